"""Gradients that accumulate over several backwards under DDP with the sparse hook, for on_ranks.py.

Every gradient counts once, whether a backward is synchronised or in no_sync(): over a whole run, the sum of all
gradients is what was applied plus what is still in the residuals. And it learns as plain DDP does.
"""

from __future__ import annotations

from itertools import cycle, product

import pytest
import torch
import torch.distributed as dist
from data_parallel import SparseHookState, sparse_hook
from data_parallel.schemes.table import COMPRESSORS
from ddp_cases import SHAPES, Run, gradients_of
from sparse_collectives import ALGORITHMS
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SETTINGS = [
    {},
    {"gradient_as_bucket_view": True},
    {"find_unused_parameters": True},
    {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    {"static_graph": True},
    {"static_graph": True, "gradient_as_bucket_view": True},
]


def run_of(**options):
    run = Run(**options)
    run.integers = dist.get_world_size() == 2  # a mean over three ranks is rounded before the next is added
    return run


def ranks_agree(run):
    """In bits: the gradients, which are means, and the parameters."""
    for tensor in [*run.module.parameters(), *(p.grad for p in run.module.parameters() if p.grad is not None)]:
        everywhere = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(everywhere, tensor.detach().contiguous())
        assert all(torch.equal(one, everywhere[0]) for one in everywhere), everywhere


def every_backward_synchronised():
    others = [name for name in (*ALGORITHMS, *COMPRESSORS) if name != "gtopk"]
    for algorithm, options in [*product(["gtopk"], SETTINGS), *zip(others, cycle(SETTINGS[:2]), strict=False)]:
        run = run_of(algorithm=algorithm, **options)
        for step in range(3):
            run.optimizer.zero_grad()
            for micro in range(3):
                run.backward(10 * step + micro)
            ranks_agree(run)
            run.take()
        run.check_conservation()


def what_was_exchanged_stays():
    """One more backward changes no more of a gradient than is selected in it, at most k entries of each bucket."""
    run = run_of()
    for step in range(4):
        run.optimizer.zero_grad()
        run.backward(10 * step)
        for micro in (1, 2):
            before = torch.cat([p.grad.flatten().clone() for p in run.module.parameters()])
            run.backward(10 * step + micro)
            after = torch.cat([p.grad.flatten() for p in run.module.parameters()])
            tenth = sum(max(1, round(0.1 * p.numel())) for p in run.module.parameters())
            assert (before - after).abs().gt(1e-5).sum() <= tenth, (before, after)
        run.take()


def learns():
    """As with no_sync(); counted again and again it came to 12 to 57 %."""
    reached = accuracy(8 * dist.get_world_size())  # as many steps, whatever the ranks
    assert reached > 0.87, reached


def some_synchronised():
    """In any order of synchronised backwards and others, as long as the last one is."""
    patterns = [(True, False, True), (False, True, True), (True, False, False, True), (False, True, False, True)]
    for turn, options in enumerate(SETTINGS):
        if options.get("static_graph"):
            continue  # DDP's first backward must be synchronised there
        for pattern in patterns[turn % 2 :: 2]:
            run = run_of(**options)
            for step in range(3):
                run.optimizer.zero_grad()
                for micro, sync in enumerate(pattern):
                    run.backward(10 * step + micro, sync=sync)
                run.take()
            ranks_agree(run)
            run.check_conservation()


def zeros_instead_of_none():
    """zero_grad(set_to_none=False) begins a step as well."""
    for options in SETTINGS:
        run = run_of(**options)
        for step in range(4):
            run.optimizer.zero_grad(set_to_none=False)
            for micro in range(2):
                run.backward(10 * step + micro)
            run.take()
        run.check_conservation()


def thrown_away():
    """What accumulated in no_sync() and was thrown away is neither sent nor taken for a mean."""
    for set_to_none, unused in ((True, ()), (False, ()), (False, ("b",))):
        run = run_of(find_unused_parameters=True)
        for step in range(4):
            run.optimizer.zero_grad()
            run.backward(10 * step)
            run.take()
            given = {name: tensor.clone() for name, tensor in run.given.items()}
            run.backward(10 * step + 1, sync=False)
            run.given = given
            run.optimizer.zero_grad(set_to_none=set_to_none)
            run.backward(10 * step + 2, unused)
            run.take()
        run.check_conservation()


def some_are_not_used():
    """b by rank 0 only, c in every second backward, a in the first of each step only."""
    for view in (False, True):
        run = run_of(find_unused_parameters=True, gradient_as_bucket_view=view)
        for step in range(5):
            run.optimizer.zero_grad()
            for micro in range(3):
                unused = {"b"} if dist.get_rank() else set()
                run.backward(10 * step + micro, unused | ({"c"} if micro % 2 else set()) | ({"a"} if micro else set()))
            ranks_agree(run)
            run.take()
        run.check_conservation()


def clipped_between():
    """What the user makes of a mean is what the next one is added to."""
    run = run_of()
    run.integers = False
    for step in range(4):
        run.optimizer.zero_grad()
        run.backward(10 * step)
        before = [p.grad.clone() for p in run.module.parameters()]
        nn.utils.clip_grad_norm_(run.module.parameters(), 1.0)
        for (name, p), old in zip(run.module.named_parameters(), before, strict=True):
            run.applied[name] += (old - p.grad) * dist.get_world_size()
        run.backward(10 * step + 1)
        run.take()
    run.check_conservation()


def scaled():
    """Three synchronised backwards a step; one that overflows takes back the whole step, on every rank."""
    for view in (False, True):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
        run = run_of(grad_scaler=scaler, gradient_as_bucket_view=view)
        run.step(90)  # DDP cuts its buckets anew after it; unscaled, as the scaler has it: 1,024 times too large
        run.given, run.applied = ({n: torch.zeros(s) for n, s in SHAPES.items()} for _ in range(2))
        for residual in run.residuals().values():
            residual.zero_()
        for step in range(6):
            run.optimizer.zero_grad()
            before, overflows = run.bits(), step in (1, 4)
            for micro in range(3):
                gradients = gradients_of(10 * step + micro, dist.get_rank())
                if overflows and micro == 1 and dist.get_rank() == 1:
                    gradients["c"] = torch.full((40,), float("inf"))
                scaler.scale(run.ddp(gradients)).backward()
                if not overflows:
                    for name, g in gradients.items():
                        run.given[name] += g
            scaler.unscale_(run.optimizer)
            if not overflows:
                for name, p in run.module.named_parameters():
                    total = p.grad * dist.get_world_size()
                    run.applied[name] += total.round() if run.integers else total
            scaler.step(run.optimizer)
            scaler.update()
            if overflows:
                assert all(torch.equal(one, other) for one, other in zip(before, run.bits(), strict=True))
        run.check_conservation()


def without_hooks_on_the_parameters():
    """Where old and new cannot be told apart it is an error, not a wrong gradient."""
    run = run_of()
    run.step(0)
    for p in run.module.parameters():
        p._backward_hooks.clear()
    with pytest.raises(RuntimeError, match=r"accumulate inside no_sync\(\)"):
        run.backward(1)


def accuracy(epochs, backwards=3):
    """Of gtopk on digits, with so many synchronised backwards a step and momentum 0.9 before the selection."""
    from sklearn.datasets import load_digits  # a second for every rank of every other case

    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    images, labels = torch.tensor(images, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)))
    ddp.register_comm_hook(SparseHookState(density=0.01, momentum=0.9), sparse_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1000)
    rank, size, batch = dist.get_rank(), dist.get_world_size(), 32
    for _ in range(epochs):
        for step in torch.randperm(1437, generator=generator).split(batch * size * backwards)[:-1]:
            optimizer.zero_grad()
            for chosen in step.view(backwards, size, batch)[:, rank]:
                (nn.functional.cross_entropy(ddp(images[chosen]), labels[chosen]) / backwards).backward()
            optimizer.step()
    with torch.no_grad():
        return float((ddp.module(images[1437:]).argmax(1) == labels[1437:]).float().mean())


LAWS = [
    every_backward_synchronised,
    what_was_exchanged_stays,
    learns,
    some_synchronised,
    zeros_instead_of_none,
    thrown_away,
    some_are_not_used,
    clipped_between,
    scaled,
    without_hooks_on_the_parameters,
]
