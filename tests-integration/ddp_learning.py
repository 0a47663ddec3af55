"""What makes the DDP hook learn as plain DDP does, and what it says where that is not so; for on_ranks.py."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
import torch.distributed as dist
from data_parallel import SparseHookState, sparse_hook
from ddp_cases import SHAPES, Run, gradients_of
from sparse_compress import WarmUp
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def flat(tensors):
    return torch.cat([tensors[name].detach().double().view(-1) for name in SHAPES])


def clipping_holds_each_ranks_gradient_to_its_part_and_loses_nothing_else():
    """Σ of what was clipped = P · applied + Σ residuals; no rank's part is longer than clip_norm · √P."""
    size = dist.get_world_size()
    for clip_norm in (0.5, 10.0, 1e6):
        run = Run(settings={"clip_norm": clip_norm, "density": 0.2})
        gradients = gradients_of(0, dist.get_rank())
        run.ddp(gradients).backward()
        residual = flat(run.state.state_dict()["distributed"]["residuals"])
        dist.all_reduce(residual)
        total = size * flat({name: p.grad for name, p in run.module.named_parameters()}) + residual
        assert total.norm() <= size * clip_norm * math.sqrt(size) * 1.0001
        whole = flat(gradients)
        dist.all_reduce(whole)
        if clip_norm == 1e6:
            torch.testing.assert_close(total, whole, rtol=1e-5, atol=1e-4)
        else:
            assert total.norm() < whole.norm()


def a_density_by_step_is_followed_and_goes_on_after_a_checkpoint():
    density = WarmUp(0.1, steps=2, stages=[1.0])

    def stepped(run, step):
        run.ddp.zero_grad()
        run.ddp(gradients_of(step, dist.get_rank())).backward()
        return flat({name: p.grad for name, p in run.module.named_parameters()})

    run = Run(settings={"density": density})
    for step in range(2):
        mean = flat(gradients_of(step, dist.get_rank()))
        dist.all_reduce(mean)
        torch.testing.assert_close(stepped(run, step), mean / dist.get_world_size())
    fresh = Run(settings={"density": density})
    fresh.state.load_state_dict(run.state.state_dict())
    for resumed in (run, fresh):
        assert int((stepped(resumed, 2) != 0).sum()) < 40  # of 79: each bucket's share


def what_is_tiny_is_summed_whole_and_nothing_is_lost():
    """Σ gradients = P · applied + Σ residuals over steps and new cuts of the buckets; b and d never wait."""
    size = dist.get_world_size()
    for momentum, backwards in ((0.0, 1), (0.0, 2), (0.9, 1)):
        run = Run(settings={"density": 0.05, "dense_below": 10}, momentum=momentum)
        before = flat(run.module.state_dict())
        given = torch.zeros_like(before)
        for step in range(3):
            run.ddp.zero_grad()
            for micro in range(backwards):
                gradients = gradients_of(10 * step + micro, dist.get_rank())
                given += flat(gradients)
                if micro < backwards - 1:
                    with run.ddp.no_sync():
                        run.ddp(gradients).backward()
                else:
                    run.ddp(gradients).backward()
            run.optimizer.step()
        kept = run.state.state_dict()["distributed"]["residuals"]
        assert not kept["b"].any()
        assert not kept["d"].any()
        if momentum:
            continue
        residual = flat(kept)
        for tensor in (given, residual):
            dist.all_reduce(tensor)
        applied = before - flat(run.module.state_dict())
        torch.testing.assert_close(given, size * applied + residual, rtol=1e-5, atol=1e-4)


def clip_norm_needs_the_names():
    with pytest.raises(ValueError, match="give named_parameters"):
        SparseHookState(clip_norm=1.0)


def said_by(make, *, steps=3, after=lambda parameters: None, **settings):
    """The warnings of a few steps with an optimizer behind the hook."""
    model = nn.Linear(30, 20)
    ddp = DistributedDataParallel(model)
    state = SparseHookState(density=0.05, named_parameters=model.named_parameters(), **settings)
    ddp.register_comm_hook(state, sparse_hook)
    optimizer = make(model.parameters())
    said = []
    for _ in range(steps):
        optimizer.zero_grad()
        ddp(torch.randn(8, 30)).square().sum().backward()
        after(model.parameters())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        said += [str(warning.message) for warning in caught if issubclass(warning.category, UserWarning)]
    return said


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def plain(parameters):
    return torch.optim.SGD(parameters, lr=0.01)


def what_learns_badly_is_said_once_at_the_optimizers_first_step():
    (said,) = said_by(momentum, momentum=0.9)
    assert "momentum is on twice" in said
    (said,) = said_by(torch.optim.AdamW, momentum=0.9)
    assert "learns worse than with either alone" in said
    (said,) = said_by(torch.optim.AdamW)
    assert "use UpdateOptimizer without DDP" in said
    (said,) = said_by(plain, after=lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.1))
    assert "SparseHookState(..., clip_norm=...)" in said


def what_is_well_is_not_remarked_on():
    assert said_by(plain, momentum=0.9) == []
    assert said_by(momentum, momentum=0.0) == []
    assert said_by(plain, clip_norm=0.1) == []
    assert said_by(plain, after=lambda parameters: nn.utils.clip_grad_norm_(parameters, 1e9)) == []


def what_comes_in_a_closure_is_seen_as_it_is():
    """As in Lightning: backward, and what clips, inside step(); accumulation outside."""
    for norm, expected in ((None, 0), (0.1, 1)):
        model = nn.Linear(30, 20)
        ddp = DistributedDataParallel(model)
        state = SparseHookState(density=0.05, named_parameters=model.named_parameters())
        ddp.register_comm_hook(state, sparse_hook)
        optimizer = plain(model.parameters())

        def backward(ddp=ddp):
            ddp(torch.randn(8, 30)).square().sum().backward()

        def closure(backward=backward, model=model, norm=norm):
            backward()
            if norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), norm)

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(5):
                optimizer.zero_grad()
                with ddp.no_sync():
                    backward()
                optimizer.step(closure)
        assert len(caught) == expected, [str(warning.message) for warning in caught]


def another_models_optimizer_is_none_of_its_business():
    other = nn.Linear(3, 3)

    def step_another(parameters):
        del parameters
        other(torch.randn(2, 3)).sum().backward()
        torch.optim.AdamW(other.parameters()).step()

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert said_by(plain, after=step_another, momentum=0.9) == []


LAWS = (
    clipping_holds_each_ranks_gradient_to_its_part_and_loses_nothing_else,
    a_density_by_step_is_followed_and_goes_on_after_a_checkpoint,
    what_is_tiny_is_summed_whole_and_nothing_is_lost,
    clip_norm_needs_the_names,
    what_learns_badly_is_said_once_at_the_optimizers_first_step,
    what_is_well_is_not_remarked_on,
    what_comes_in_a_closure_is_seen_as_it_is,
    another_models_optimizer_is_none_of_its_business,
)
