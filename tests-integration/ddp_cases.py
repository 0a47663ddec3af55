"""DDP's features with the sparse hook, for on_ranks.py.

Gradients are integers, so that conservation is exact: over a whole run, the sum of all gradients is what was applied
plus what is still in the residuals.
"""

from __future__ import annotations

import copy
import inspect
import io
import tempfile
from contextlib import nullcontext
from itertools import cycle, product

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from communicators import CollectiveError
from data_parallel import SparseHookState, reshard_residuals, sparse_hook
from data_parallel.schemes.table import COMPRESSORS
from sparse_collectives import ALGORITHMS
from sparse_compress import RandomK
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

STEPS = 6
SHAPES = {"a": (5, 3), "b": (7,), "c": (40,), "d": (1,), "e": (4, 4)}
FOLDERS = list[tempfile.TemporaryDirectory[str]]()


class Linear(nn.Module):
    """Σ ⟨p, g⟩ over the parameters that are used: the gradient of p is g, exactly."""

    def __init__(self, shapes=SHAPES):
        super().__init__()
        self.shapes = shapes
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))

    def forward(self, gradients):
        return sum((getattr(self, name) * g).sum() for name, g in gradients.items())


def gradients_of(step, rank, unused=(), shapes=SHAPES):
    generator = torch.Generator().manual_seed(100 * step + rank)
    drawn = {name: torch.randint(-9, 10, shape, generator=generator).float() for name, shape in shapes.items()}
    return {name: g for name, g in drawn.items() if name not in unused}


class Run:
    """A model under DDP with the hook; counts what goes in and what comes out."""

    def __init__(
        self,
        *,
        algorithm="gtopk",
        wire="fp32",
        momentum=0.0,
        grad_scaler=None,
        named=True,
        process_group=None,
        module=None,
        settings=None,
        **ddp,
    ):
        if algorithm == "powersgd":
            settings = {"options": {"dense_steps": 0}, **(settings or {})}
        self.module = Linear() if module is None else module
        self.shapes = self.module.shapes
        ddp = {"bucket_cap_mb": 1e-4, **ddp}  # several buckets
        self.ddp = DistributedDataParallel(self.module, process_group=process_group, **ddp)
        names = self.module.named_parameters() if named else ()
        self.state = SparseHookState(
            process_group,
            algorithm=algorithm,
            wire=wire,
            momentum=momentum,
            grad_scaler=grad_scaler,
            named_parameters=names,
            **{"density": 0.1, **(settings or {})},
        )
        self.ddp.register_comm_hook(self.state, sparse_hook)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=1.0)
        self.integers = True  # all that is summed, so that rounding takes away what dividing and multiplying adds
        self.given = {name: torch.zeros(shape) for name, shape in self.shapes.items()}
        self.applied = {name: torch.zeros(shape) for name, shape in self.shapes.items()}

    def step(self, step, unused=(), backwards=1):
        self.optimizer.zero_grad()
        for micro in range(backwards):
            self.backward(10 * step + micro, unused, sync=micro == backwards - 1)
        self.take()

    def backward(self, seed, unused=(), *, sync=True):
        gradients = gradients_of(seed, dist.get_rank(), unused, self.shapes)
        for name, g in gradients.items():
            self.given[name] += g
        with nullcontext() if sync else self.ddp.no_sync():
            self.ddp(gradients).backward()

    def take(self):
        for name, p in self.module.named_parameters():
            if p.grad is not None:
                total = p.grad * self.state.comm.size
                self.applied[name] += torch.round(total) if self.integers else total
        self.optimizer.step()

    def residuals(self):
        parts = self.state.state_dict()["distributed"]["residuals"]
        return {name: parts.get(name, torch.zeros(shape)) for name, shape in self.shapes.items()}

    def check_conservation(self):
        """Σ over ranks and steps of the gradients = Σ over steps of what was applied + Σ over ranks of residuals."""
        for name in self.shapes:
            given, kept = self.given[name].clone(), self.residuals()[name].clone()
            dist.all_reduce(given)
            dist.all_reduce(kept)
            found = self.applied[name] + kept
            same = torch.equal(given, found) if self.integers else torch.allclose(given, found, atol=1e-3)
            assert same, (name, given, self.applied[name], kept)

    def bits(self):
        return [p.detach().clone() for p in self.module.parameters()] + [r.clone() for r in self.residuals().values()]


def all_steps(run, steps=range(STEPS), **options):
    for step in steps:
        run.step(step, **options)
    run.check_conservation()
    return run


def plain():
    for algorithm in ALGORITHMS:
        all_steps(Run(algorithm=algorithm))


def fewer_bytes():
    """What is rounded off waits in the residuals; in a dense sum it is lost, but integers up to 256 have no rest."""
    sparse = [name for name, entry in ALGORITHMS.items() if entry.selects]
    ways = [*zip(sparse, cycle(["bf16-packed", "int8"]), strict=False), ("dense", "bf16"), ("dense", "fp16")]
    for algorithm, wire in ways:
        run = Run(algorithm=algorithm, wire=wire)
        run.integers = algorithm != "dense"
        for step in range(STEPS):
            run.step(step)
        if run.integers:
            run.check_conservation()
        else:
            means_are_near(run)


def means_are_near(run):
    for name in SHAPES:
        given = run.given[name].clone()
        dist.all_reduce(given)
        assert torch.allclose(given, run.applied[name], atol=0.3)  # 6 steps of at most 27, in steps of 2^-4


def gradient_as_bucket_view():
    all_steps(Run(gradient_as_bucket_view=True))


def static_graph():
    all_steps(Run(static_graph=True))


def other_layouts():
    """Element by element, also where DDP lays gradients into its buckets by the parameters' strides."""
    shapes = {"image": (6, 4, 3, 3), "transposed": (5, 8), "gaps": (4, 5)}
    module = Linear(shapes).to(memory_format=torch.channels_last)
    module.transposed.data = torch.zeros(8, 5).T
    module.gaps.data = torch.zeros(4, 10)[:, ::2]  # not dense: DDP takes it as contiguous
    assert not any(p.is_contiguous() for p in module.parameters())
    strided, contiguous = Run(module=module), Run(module=Linear(shapes))
    all_steps(strided, range(3))
    contiguous.state.load_state_dict(saved(strided.state.state_dict()))
    contiguous.given, contiguous.applied = strided.given, strided.applied
    all_steps(contiguous, range(3, STEPS))


def accumulation_in_no_sync():
    all_steps(Run(), backwards=3)


def near(algorithm, **options):
    """A run of an algorithm whose sums round where the others' are exact."""
    run = Run(
        algorithm=algorithm,
        settings={"options": {"rank": 1, "dense_steps": 0}} if algorithm == "powersgd" else None,
        **options,
    )
    run.integers = algorithm not in COMPRESSORS
    return run


def locally_and_globally_unused():
    """b is used by rank 0 alone, c and the matrix e by nobody at odd steps: what waits in their residuals must not be
    lost."""
    for algorithm in ("gtopk", *COMPRESSORS):
        run = near(algorithm, find_unused_parameters=True)
        for step in range(STEPS):
            unused = ({"b"} if dist.get_rank() else set()) | ({"c", "e"} if step % 2 else set())
            run.step(step, unused=unused)
        run.check_conservation()
        assert algorithm == "dense-int8" or any(bool(residual.any()) for residual in run.residuals().values())


def never_used():
    for algorithm in ("gtopk", *COMPRESSORS):
        run = all_steps(near(algorithm, find_unused_parameters=True), unused=("d",))
        assert run.module.d.grad is None


def unused_in_accumulation():
    all_steps(Run(find_unused_parameters=True), unused=("a",), backwards=2)


def without_names():
    run = Run(named=False)
    for step in range(3):
        run.step(step)
    residuals = run.state.state_dict()["distributed"]["residuals"]
    assert sorted(residuals) == [f"parameter {i}" for i in range(len(SHAPES))]


def mixed_precision():
    """An overflow on one rank: no rank steps, residuals stay bit for bit, also of buckets that went before."""
    for algorithm in ("gtopk", *COMPRESSORS):
        overflowing(algorithm)


def overflowing(algorithm):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
    asked, get_scale = [], scaler.get_scale
    scaler.get_scale = lambda: asked.append(1) or get_scale()
    run = near(algorithm, grad_scaler=scaler)
    for step in range(STEPS):
        run.optimizer.zero_grad()
        gradients = gradients_of(step, dist.get_rank())
        overflow = step in (0, 3)
        if overflow and dist.get_rank() == 1:
            gradients["a"] = torch.full((5, 3), float("inf"))
        before = run.bits()
        scaler.scale(run.ddp(gradients)).backward()
        scaler.unscale_(run.optimizer)
        if not overflow:
            for name, p in run.module.named_parameters():
                run.given[name] += gradients[name]
                total = p.grad * dist.get_world_size()
                run.applied[name] += torch.round(total) if run.integers else total
        scaler.step(run.optimizer)
        scaler.update()
        if overflow:
            assert all(torch.equal(one, other) for one, other in zip(before, run.bits(), strict=True))
    assert len(asked) == STEPS  # not by every bucket: a GPU waits
    assert scaler.get_scale() == 2.0**8
    run.check_conservation()


def overflow_before_buckets_are_known():
    """The first steps are skipped, while DDP cuts its buckets: what the algorithm learns later is kept all the same."""
    for algorithm in ("oktopk", "spardl"):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
        run = Run(algorithm=algorithm, grad_scaler=scaler)
        for step in range(STEPS):
            run.optimizer.zero_grad()
            gradients = gradients_of(step, dist.get_rank())
            if step < 2:
                gradients["a"] = torch.full((5, 3), float("inf"))
            scaler.scale(run.ddp(gradients)).backward()
            scaler.step(run.optimizer)
            scaler.update()
        states = dict(run.state.state_dict()["distributed"]["algorithm_state"])
        assert len(states) > 1, states
        assert {state["step"] for state in states.values()} == {STEPS - 2}, states


def overflow_in_the_sum():
    """Every rank's scaled gradient is finite, their mean with what waited is not: the step is skipped on all."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
    run = Run(grad_scaler=scaler)
    took = []
    for _ in range(12):
        run.optimizer.zero_grad()
        gradients = {name: torch.full(shape, 9 * 2.0**112) for name, shape in SHAPES.items()}  # what is not sent grows
        before = run.bits()
        scaler.scale(run.ddp(gradients)).backward()
        scaler.unscale_(run.optimizer)
        took.append(all(bool(torch.isfinite(p.grad).all()) for p in run.module.parameters()))
        for name, p in run.module.named_parameters():
            if took[-1]:
                run.given[name] += gradients[name]
                run.applied[name] += torch.round(p.grad * dist.get_world_size())
        scaler.step(run.optimizer)
        scaler.update()
        if not took[-1]:
            assert all(torch.equal(one, other) for one, other in zip(before, run.bits(), strict=True))
    assert set(took) == {True, False}
    run.check_conservation()


def saved(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def written_by_rank_0(state):
    """One file for all ranks, as frameworks write it."""
    written = [saved(state.gathered_state_dict())]
    assert dist.get_rank() == 0 or written == [{}]
    dist.broadcast_object_list(written)
    return written[0]


def resume_is_exact():
    """Save, start anew, load: the same bits as never having stopped (buckets stay as they are with this flag)."""
    every = [(name, 0.5 * entry.selects) for name, entry in ALGORITHMS.items()]
    every += [(name, 0.0) for name in COMPRESSORS]
    for algorithm, momentum in [("gtopk", 0.0), *every]:
        options = {"algorithm": algorithm, "momentum": momentum, "find_unused_parameters": True}
        whole, first, second = Run(**options), Run(**options), Run(**options)
        for step in range(4):
            whole.step(step)
        for step in range(2):
            first.step(step)
        second.module.load_state_dict(saved(first.module.state_dict()))
        second.state.load_state_dict(written_by_rank_0(first.state) if momentum else saved(first.state.state_dict()))
        for step in range(2, 4):
            second.step(step)
        for one, other in zip(whole.bits(), second.bits(), strict=True):
            assert torch.equal(one, other)
        kept = [run.state.state_dict()["distributed"] for run in (whole, second)]
        assert kept[0]["algorithm_state"] == kept[1]["algorithm_state"]
        assert kept[0].get("directions") == kept[1].get("directions")


def resume_is_exact_although_ddp_cuts_anew():
    """A new module's buckets are others than those that it has after its first steps, one or several."""
    ways = [{}, {"named": False}, {"static_graph": True}, {"bucket_cap_mb": 25}, {"gradient_as_bucket_view": True}]
    every = [{"algorithm": name} for name in (*ALGORITHMS, *COMPRESSORS) if name != "gtopk"]
    for options in [*ways, *every]:
        whole, second = Run(**options), Run(**options)
        for step in range(6):
            if step == 3:
                second.module.load_state_dict(saved(whole.module.state_dict()))
                second.state.load_state_dict(saved(whole.state.state_dict()))
                second.state.load_state_dict(saved(second.state.state_dict()))  # passed on, not used up
            whole.step(step)
            if step >= 3:
                second.step(step)
                assert all(map(torch.equal, whole.bits(), second.bits())), (options, step)
        kept = [run.state.state_dict()["distributed"] for run in (whole, second)]
        assert kept[0]["buckets"] == kept[1]["buckets"]
        assert sorted(dict(kept[0]["algorithm_state"])) == sorted(dict(kept[1]["algorithm_state"]))


def resume_into_other_buckets():
    """Where the checkpoint does not say how they were cut, or of other parameters, nothing is lost on the way."""
    for buckets in ([], [["a", "b"]], [["a", "b", "c", "d", "other"]]):
        first, second = Run(), Run()
        for step in range(3):
            first.step(step)
        state = saved(first.state.state_dict())
        state["distributed"]["buckets"] = buckets
        second.state.load_state_dict(state)
        second.given, second.applied = first.given, first.applied
        all_steps(second, range(3, STEPS))
    for damaged in ("a", [["a", 3]], [[]], {"a": 1}):
        state["distributed"]["buckets"] = damaged
        with pytest.raises(ValueError, match="it was damaged"):
            second.state.load_state_dict(state)


def pickled(thing):
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def copies_go_on_by_themselves():
    """Of a DDP module with its state, by deepcopy and by torch.save: the bits of the original, and nothing shared."""
    for options in ({}, {"named": False}, {"algorithm": "spardl", "momentum": 0.5}, {"algorithm": "powersgd"}):
        run = Run(**options)
        for step in range(3):
            run.step(step)
        copies = [copy.deepcopy(run), pickled(run)]
        AveragedModel(run.ddp)
        for other in copies:
            (_, state), *_ = other.ddp._comm_hooks
            assert state is other.state is not run.state
            other.ddp.register_comm_hook(state, sparse_hook)
        before = run.bits()
        for other in copies:  # one after the other, so that what they shared would show
            assert all(map(torch.equal, other.bits(), before))
            for step in range(3, 6):
                other.step(step)
            assert all(map(torch.equal, run.bits(), before))
        for step in range(3, 6):
            run.step(step)
        for other in copies:
            assert all(map(torch.equal, other.bits(), run.bits())), options


def copies_that_would_lose_something():
    scaler = torch.amp.GradScaler("cpu")
    run, group = Run(grad_scaler=scaler), dist.new_group()
    run.step(0)
    assert copy.deepcopy(run.state)._grad_scaler is scaler
    with pytest.raises(RuntimeError, match=r"with a grad_scaler is no file.* save state\.state_dict\(\)"):
        pickled(run.state)
    other = SparseHookState(group)
    assert copy.deepcopy(other)._group is group
    with pytest.raises(RuntimeError, match=r"another process group .* save state\.state_dict\(\)"):
        pickled(other)
    copied = copy.deepcopy(Run().state)  # without the module: its parameters are nobody's
    ddp = DistributedDataParallel(Linear())
    ddp.register_comm_hook(copied, sparse_hook)
    with pytest.raises(ValueError, match="that is not among named_parameters"):
        ddp(gradients_of(0, 0)).backward()


def errors_in_the_first_backward_after_a_checkpoint():
    first, second = Run(), Run()
    for step in range(3):
        first.step(step)
    second.state.load_state_dict(saved(first.state.state_dict()))
    gradients = gradients_of(3, dist.get_rank())
    if dist.get_rank() == 1:
        gradients["c"][5] = torch.nan
    with pytest.raises(CollectiveError, match=r"^rank 1: the gradient of 'c' is not finite"):
        second.ddp(gradients).backward()


def folder():
    """A folder for all ranks, which rank 0 removes when it ends."""
    if dist.get_rank() == 0:
        FOLDERS.append(tempfile.TemporaryDirectory())
    found = [FOLDERS[-1].name if FOLDERS else None]
    dist.broadcast_object_list(found)
    return found[0]


def distributed_checkpoint():
    """The usual resume: what a new state reports is what is loaded into."""
    for algorithm, momentum in [
        ("gtopk", 0.0),
        ("oktopk", 0.5),
        ("spardl", 0.0),
        ("powersgd", 0.0),
        ("dense-int8", 0.0),
    ]:
        run, template, stateful = (Run(algorithm=algorithm, momentum=momentum) for _ in range(3))
        for step in range(3):
            run.step(step)
        where = folder()
        key = f"hook {dist.get_rank()}"
        dcp.save({key: run.state}, checkpoint_id=where)
        loaded = {key: template.state.state_dict()}
        dcp.load(loaded, checkpoint_id=where)
        template.state.load_state_dict(loaded[key])
        dcp.load({key: stateful.state}, checkpoint_id=where)
        own = run.state.state_dict()["distributed"]
        for state in (template.state, stateful.state):
            found = state.state_dict()["distributed"]
            assert found["algorithm_state"] == own["algorithm_state"]
            assert found.get("directions") == own.get("directions")
            for part in ("residuals", "velocities"):
                assert sorted(own[part]) == (sorted(SHAPES) if part == "residuals" or momentum else [])
                assert sorted(found[part]) == sorted(own[part])
                assert all(torch.equal(found[part][name], tensor) for name, tensor in own[part].items())


def new_state():
    """Zeros for all that learns, and only for that: DDP brings nothing else."""
    module = Linear().to(torch.bfloat16)
    options = {"momentum": 0.5, "named_parameters": list(module.named_parameters())}
    state = SparseHookState(**options).state_dict()
    for part in ("residuals", "velocities"):
        zeros = state["distributed"][part]
        assert {name: (tuple(t.shape), t.dtype, bool(t.any())) for name, t in zeros.items()} == {
            name: (shape, torch.float32, False) for name, shape in SHAPES.items()
        }
    dense = SparseHookState(algorithm="dense", named_parameters=options["named_parameters"])
    assert not dense.state_dict()["distributed"]["residuals"]
    module.a.requires_grad_(False)
    state = SparseHookState(**options)
    state.load_state_dict(state.state_dict())
    assert "a" not in state.state_dict()["distributed"]["residuals"]
    ddp = DistributedDataParallel(module)
    ddp.register_comm_hook(state, sparse_hook)
    for step in range(3):
        ddp(gradients_of(step, dist.get_rank())).backward()


def other_world_size():
    """Trained on P ranks, on P − 1, on P again, and on P − 1 without the residuals.

    As means over ranks: what was given is what was applied, what waits and what was dropped.
    """
    rank, everybody = dist.get_rank(), dist.get_world_size()
    world, fewer = dist.group.WORLD, dist.new_group(list(range(everybody - 1)))
    given, applied, dropped, waiting = (dict.fromkeys(SHAPES, 0.0) for _ in range(4))
    states, whole = [], {}
    for stage, (group, drop) in enumerate([(world, False), (fewer, False), (world, False), (fewer, True)]):
        size = everybody if group is world else everybody - 1
        dropped = waiting if drop else dropped
        own = None
        if rank < size:
            run = Run(process_group=group)
            run.integers = False
            if states:
                for wrong in (states[0], whole):
                    with pytest.raises(ValueError, match="reshard_residuals"):
                        run.state.load_state_dict(wrong)
                states = whole if stage % 2 else states
                run.state.load_state_dict(saved(reshard_residuals(states, size, drop=drop)[rank]))
            for step in range(STEPS):
                run.step(STEPS * stage + step)
            own = saved(run.state.state_dict()), run.given, run.applied
            whole = saved(run.state.gathered_state_dict())
        gathered, written = [None] * everybody, [whole]
        dist.all_gather_object(gathered, own)
        dist.broadcast_object_list(written)
        whole = written[0]
        states = [state for state, _, _ in gathered[:size]]
        waiting = mean([state["distributed"]["residuals"] for state in states])
        more_given = mean([given for _, given, _ in gathered[:size]])
        sums = gathered[0][2]  # the same on every rank
        given = {name: given[name] + more_given[name] for name in SHAPES}
        applied = {name: applied[name] + sums[name] / size for name in SHAPES}
    for name in SHAPES:
        expected = applied[name] + waiting[name] + dropped[name]
        torch.testing.assert_close(given[name], expected, rtol=0, atol=1e-3)


def mean(tensors):
    """Over ranks, by name."""
    return {name: sum(rank[name] for rank in tensors) / len(tensors) for name in SHAPES}


def states_that_do_not_fit():
    """Said before a step where names tell it, else in the first backward; never lost in silence."""
    named, numbered = all_steps(Run()).state.state_dict(), Run(named=False)
    numbered.step(0)
    numbered = numbered.state.state_dict()
    with pytest.raises(ValueError, match="saved without named_parameters, so it numbers parameters"):
        Run().state.load_state_dict(numbered)
    residuals = named["distributed"]["residuals"]
    bent = {"distributed": {**named["distributed"], "residuals": {**residuals, "b": torch.ones(3, 3)}}}
    with pytest.raises(ValueError, match=r"of other shapes than the parameters: \['b: \(3, 3\), not \(7,\)'\]"):
        Run().state.load_state_dict(bent)
    fewer = {"distributed": {**named["distributed"], "residuals": {"b": residuals["b"]}}}
    with pytest.raises(ValueError, match=r"only the checkpoint, or only the model, has \['a', 'c', 'd', 'e'\]"):
        Run().state.load_state_dict(fewer)
    with pytest.raises(ValueError, match="a dense exchange has no use for"):
        Run(algorithm="dense").state.load_state_dict(named)
    dropped = reshard_residuals(gathered_states(named), dist.get_world_size(), drop=True)[dist.get_rank()]
    dense = Run(algorithm="dense")
    dense.state.load_state_dict(dropped)
    all_steps(dense).state.state_dict()
    run = Run(named=False)
    run.state.load_state_dict(named)
    with pytest.raises(ValueError, match=r"that DDP does not bring: \['a', 'b', 'c', 'd', 'e'\]"):
        run.step(0)
    run = Run(named=False)
    run.step(0)
    before = {name: residual.clone() for name, residual in run.state.state_dict()["distributed"]["residuals"].items()}
    with pytest.raises(ValueError, match="saved with named_parameters: give this SparseHookState named_parameters"):
        run.state.load_state_dict(named)
    after = run.state.state_dict()["distributed"]["residuals"]
    assert all(torch.equal(after[name], residual) for name, residual in before.items())


def gathered_states(state):
    states = [None] * dist.get_world_size()
    dist.all_gather_object(states, state)
    return states


def dense_with_a_scaler():
    """Nothing is kept back, so a step that overflowed is as if it had not been."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
    run = Run(algorithm="dense", grad_scaler=scaler)
    for step in range(3):
        run.optimizer.zero_grad()
        gradients = gradients_of(step, dist.get_rank())
        if step == 1:
            gradients["b"] = torch.full((7,), float("nan" if dist.get_rank() else 1.0))
        scaler.scale(run.ddp(gradients)).backward()
        scaler.step(run.optimizer)
        scaler.update()
    for name, p in run.module.named_parameters():
        steps = (gradients_of(step, rank)[name] for step in (0, 2) for rank in range(dist.get_world_size()))
        torch.testing.assert_close(p, -sum(steps) / dist.get_world_size())


def complex_parameters():
    """DDP's buckets hold their real views, which the parameters' shapes do not tell."""
    if "init_sync" not in inspect.signature(DistributedDataParallel).parameters:
        return  # an old torch, whose DDP takes none over gloo
    for algorithm in ("gtopk", "dense"):
        module = nn.Linear(3, 2, bias=False, dtype=torch.complex64)
        ddp = DistributedDataParallel(module)
        ddp.register_comm_hook(SparseHookState(algorithm=algorithm), sparse_hook)
        with pytest.raises(TypeError, match="complex parameter 'parameter 0'"):
            ddp(torch.ones(1, 3, dtype=torch.complex64)).abs().sum().backward()
        with pytest.raises(TypeError, match=r"weight \(torch.complex64\)"):
            SparseHookState(algorithm=algorithm, named_parameters=module.named_parameters())


def wrong_arguments():
    module = nn.Linear(3, 2)
    with pytest.raises(TypeError, match=r"pass model.named_parameters\(\), not model.parameters\(\)"):
        SparseHookState(named_parameters=module.parameters())
    with pytest.raises(ValueError, match=r"duplicate names in named_parameters: \['p'\]"):
        SparseHookState(named_parameters=[("p", p) for p in module.parameters()])
    with pytest.raises(TypeError, match="grad_scaler is True, expected the GradScaler itself"):
        SparseHookState(grad_scaler=True)
    ddp = DistributedDataParallel(module)
    ddp.register_comm_hook(None, sparse_hook)
    with pytest.raises(TypeError, match=r"ddp.register_comm_hook\(SparseHookState\(...\), sparse_hook\)"):
        ddp(torch.ones(1, 3)).sum().backward()


def nan_in_a_dense_sum():
    run = Run(algorithm="dense")
    gradients = gradients_of(0, dist.get_rank())
    if dist.get_rank() == 1:
        gradients["c"][3] = float("nan")
    with pytest.raises(CollectiveError, match=r"^rank 1: the gradient of 'c' is not finite"):
        run.ddp(gradients).backward()


def nan_without_scaler():
    """Whatever the algorithm, wire and compressor; the ranks can still be used afterwards."""
    choices = [(name, None) for name, entry in ALGORITHMS.items() if entry.selects] + [("gtopk", RandomK(0.05))]
    for (algorithm, compressor), wire in product(choices, ["fp32", "bf16-packed", "int8"]):
        settings = {"density": 0.1} if compressor is None else {"density": None, "compressor": compressor}
        run = Run(algorithm=algorithm, wire=wire, settings=settings)
        gradients = gradients_of(0, dist.get_rank())
        if dist.get_rank() == 1:
            gradients["c"][3] = float("nan")
        with pytest.raises(CollectiveError, match=r"^rank 1: the gradient of 'c' is not finite"):
            run.ddp(gradients).backward()
    all_steps(Run())


LAWS = [
    plain,
    fewer_bytes,
    gradient_as_bucket_view,
    static_graph,
    other_layouts,
    accumulation_in_no_sync,
    locally_and_globally_unused,
    never_used,
    unused_in_accumulation,
    without_names,
    mixed_precision,
    overflow_before_buckets_are_known,
    overflow_in_the_sum,
    resume_is_exact,
    resume_is_exact_although_ddp_cuts_anew,
    resume_into_other_buckets,
    errors_in_the_first_backward_after_a_checkpoint,
    copies_go_on_by_themselves,
    copies_that_would_lose_something,
    distributed_checkpoint,
    new_state,
    other_world_size,
    states_that_do_not_fit,
    dense_with_a_scaler,
    complex_parameters,
    wrong_arguments,
    nan_in_a_dense_sum,
    nan_without_scaler,
]
SELDOM = [resume_is_exact_although_ddp_cuts_anew, copies_go_on_by_themselves]
