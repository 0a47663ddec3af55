"""A `DenseCompressor` of one's own, which sends something of every element, wherever an Algorithm may stand."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from communicators import Alone, CollectiveError, SimulatedWorld, schedules
from data_parallel import DenseCompressor, DistributedOptimizer, SparseHookState, sparse_hook
from data_parallel.testing import check_dense_laws
from sparse_collectives import DenseReduction
from sparse_collectives.algorithms.gtopk import GTopK
from torch import nn

pytestmark = pytest.mark.quick


@dataclass(frozen=True)
class Rounded(DenseCompressor):
    """Gradients in steps of 1 / `per_unit`; what is rounded off waits for the next step."""

    name = "rounded"
    per_unit: int = 1

    def __post_init__(self):
        if self.per_unit < 1:
            raise ValueError(f"per_unit is {self.per_unit}, expected 1 or more")

    def schedule(self, accumulated, rank, size):
        sent = (accumulated * self.per_unit).round() / self.per_unit
        total = yield from schedules.allreduce(sent, rank, size)
        return DenseReduction(total, accumulated - sent)


class Alternating(Rounded):
    """Coarser in every other step of those that stand."""

    name = "alternating"

    def initial_state(self, numel):
        return {"steps": 0, "numel": numel}

    def schedule(self, accumulated, rank, size, state):
        sent = (accumulated / (1 + state["steps"] % 2)).round() * (1 + state["steps"] % 2)
        total = yield from schedules.allreduce(sent, rank, size)
        state["steps"] += 1
        return DenseReduction(total, accumulated - sent)


ROUNDED = Rounded()


def named(name, **methods):
    return type("Mine", (Rounded,), {"name": name, **methods})()


def train(comm, steps, *, algorithm=ROUNDED, saved=None, bad=(), **options):
    """Σ of its gradients, −P · parameters, its residual; the optimizer's state and the model's."""
    model = nn.ParameterDict({"a": nn.Parameter(torch.zeros(5, 3)), "b": nn.Parameter(torch.zeros(7))})
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = DistributedOptimizer(inner, model.named_parameters(), comm=comm, algorithm=algorithm, **options)
    if saved is not None:
        optimizer.load_state_dict(saved[3])
        model.load_state_dict(saved[4])
    given = torch.zeros(22)
    for step in steps:
        generator = torch.Generator().manual_seed(10 * step + comm.rank)
        gradient = torch.randint(-99, 100, (22,), generator=generator) / 4
        if step in bad and comm.rank == comm.size - 1:
            gradient[20] = torch.inf
        elif step not in bad:
            given += gradient
        model["a"].grad, model["b"].grad = gradient[:15].view(5, 3), gradient[15:]
        optimizer.step()
    state = optimizer.state_dict()
    applied, rest = (
        [tensors[name].detach().view(-1) for name in "ab"] for tensors in (model, state["distributed"]["residuals"])
    )
    return given, -comm.size * torch.cat(applied), torch.cat(rest), state, dict(model.state_dict())


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("settings", [{}, {"overlap": True}, {"bucket_bytes": 24}], ids=str)
@pytest.mark.parametrize("make", [Rounded, lambda: Rounded(per_unit=2), Alternating])
def test_laws(make, settings):
    check_dense_laws(make, atol=0.0, **settings)


def hiding(self, accumulated, rank, size):
    total = yield from schedules.allreduce(accumulated.nan_to_num(0, 0, 0), rank, size)
    return DenseReduction(total, torch.zeros_like(accumulated))


def hiding_nan(self, accumulated, rank, size):
    total = yield from schedules.allreduce(accumulated, rank, size)
    return DenseReduction(torch.where(total.isnan(), 0.0, total), torch.zeros_like(accumulated))


def losing(self, accumulated, rank, size):
    total = yield from schedules.allreduce(accumulated.round(), rank, size)
    return DenseReduction(total, torch.zeros_like(accumulated))


def parting(self, accumulated, rank, size):
    reduction = yield from ROUNDED.schedule(accumulated, rank, size)
    return DenseReduction(reduction.total + rank, reduction.dropped)


def finely(self, accumulated, rank, size):
    reduction = yield from Rounded(per_unit=256).schedule(accumulated, rank, size)
    return DenseReduction(reduction.total, torch.zeros_like(accumulated))


def stateful(self, accumulated, rank, size, state):
    return (yield from ROUNDED.schedule(accumulated, rank, size))


def keeping(state):
    """Methods of a compressor whose state this makes."""
    return {"schedule": stateful, "initial_state": lambda self, numel: state()}


def forgetful(self, accumulated, rank, size):
    vars(self).setdefault("steps", 0)
    return (yield from Alternating().schedule(accumulated, rank, size, vars(self)))


@pytest.mark.parametrize(
    ("methods", "says"),
    [
        ({"schedule": hiding}, "an inf or a NaN of rank 0 does not show"),
        ({"schedule": hiding_nan}, "an inf or a NaN of rank 0 does not show"),
        ({"schedule": losing}, "conservation: .* of 1"),
        ({"schedule": finely}, "conservation: .* of 1"),
        ({"schedule": parting}, "agreement: .* on rank 1 of 2"),
        ({"schedule": forgetful}, "a resumed run has other bits on rank 0 of 1"),
        (keeping(lambda: {"n": np.float64(1)}), r"bucket .*weights_only=True\) refuses the state .*such as float\(x\)"),
        (keeping(lambda: [3]), r"the state is \[3\], expected a dict"),
        (keeping(lambda shared={}: shared), "returns the same {} twice"),
    ],
)
def test_laws_that_do_not_hold(methods, says):
    own = named("mine", **methods)
    with pytest.raises(AssertionError, match=says):
        check_dense_laws(lambda: own)


def test_laws_of_a_compressor_in_place_of_what_makes_it():
    for other, given in ((ROUNDED, r"Rounded\(per_unit=1\)"), (None, "None")):
        with pytest.raises(TypeError, match=f"make is {given}, expected a function"):
            check_dense_laws(other)
    for nothing in ((), 2):
        with pytest.raises(ValueError, match="checks nothing"):
            check_dense_laws(Rounded, sizes=nothing)


def returning(**parts):
    def schedule(self, accumulated, rank, size):
        yield from ()
        whole = DenseReduction(accumulated, torch.zeros_like(accumulated))
        return replace(whole, **{key: part(accumulated) for key, part in parts.items()})

    return schedule


def in_place(self, accumulated, rank, size):
    total = yield from schedules.allreduce(accumulated.sub_(1), rank, size)
    return DenseReduction(total, torch.ones_like(accumulated))


def of_a_tuple(self, accumulated, rank, size):
    yield from ()
    return accumulated, accumulated


@pytest.mark.parametrize(
    ("schedule", "says"),
    [
        (lambda self, accumulated, rank, size: DenseReduction(accumulated, accumulated), "mine is no generator"),
        (of_a_tuple, "mine returned a tuple"),
        (in_place, "mine wrote to `accumulated`"),
        (returning(total=lambda a: a[:5]), r"mine returned torch.float32 of \(5,\) as its total"),
        (returning(total=lambda a: a.half()), "torch.float16 of .* as its total"),
        (returning(dropped=lambda a: a.double()), "torch.float64 of .* as its dropped"),
        (returning(dropped=lambda a: None), "mine returned None as its dropped"),
    ],
)
def test_what_a_schedule_must_not_return(schedule, says):
    with pytest.raises(CollectiveError, match=says):
        SimulatedWorld(2).run(lambda comm: train(comm, [0], algorithm=named("mine", schedule=schedule)))


@dataclass(frozen=True)
class Columns(Rounded):
    """Keeps its dropped values in its state too, with a graph, as a column or a row."""

    name = "columns"
    dim: int = 1

    def initial_state(self, numel):
        return {"step": 0, "pair": torch.zeros(numel, 2) if self.dim else torch.zeros(2, numel)}

    def schedule(self, accumulated, rank, size, state):
        pair = torch.stack([accumulated.round(), accumulated - accumulated.round()], self.dim).requires_grad_()
        total = yield from schedules.allreduce(pair.select(self.dim, 0).contiguous(), rank, size)
        state["pair"] = pair.detach()
        state["step"] += 1
        return DenseReduction(total, pair.select(self.dim, 1))


@dataclass(frozen=True)
class Mistaken(Columns):
    """Counts on a rank of its own."""

    def schedule(self, accumulated, rank, size, state):
        before = state["step"]
        reduction = yield from super().schedule(accumulated, rank, size, state)
        if rank:
            state["step"] = before
        return reduction


class Ones(nn.Module):
    """One parameter of two layouts, of which one takes part in even steps alone."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(5, 2), nn.Linear(5, 3)

    def forward(self, x, both):
        return self.a(x).square().sum() + (self.b(x).square().sum() if both else 0)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("steps", [5, 6])
def test_what_waits_is_kept_as_it_is_however_it_lies(dim, steps):
    """Under DDP, where parameters take no part in some steps."""

    def trained(algorithm):
        torch.manual_seed(0)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            ddp = nn.parallel.DistributedDataParallel(Ones(), find_unused_parameters=True)
            state = SparseHookState(algorithm=algorithm, named_parameters=ddp.module.named_parameters())
            ddp.register_comm_hook(state, sparse_hook)
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
            for step in range(steps):
                optimizer.zero_grad()
                ddp(torch.randn(8, 5), step % 2 == 0).backward()
                optimizer.step()
            own = state.state_dict()["distributed"]
            kept = [int(kept["pair"].select(dim, 1).count_nonzero()) for _, kept in own["algorithm_state"]]
            assert kept in ([], [30 if steps % 2 else 12]), "the residual of an unused part was added to the state"
            return [p.detach() for p in ddp.parameters()], list(own["residuals"].values())
        finally:
            dist.destroy_process_group()

    for mine, plain in zip(trained(Columns(dim=dim)), trained(ROUNDED), strict=True):
        assert all(map(torch.equal, mine, plain))
        assert not any(one.requires_grad for one in mine)


class Growing(Rounded):
    """Keeps its last total, of which the first state has nothing."""

    name = "growing"

    def initial_state(self, numel):
        return {"last": torch.empty(0), "calls": 0}

    def schedule(self, accumulated, rank, size, state):
        reduction = yield from super().schedule(accumulated, rank, size)
        state["last"], state["calls"] = reduction.total.clone(), state["calls"] + 1
        return reduction


def test_a_state_may_grow():
    saved = SimulatedWorld(1).run(lambda comm: train(comm, range(3), algorithm=Growing()))[0]
    after = SimulatedWorld(1).run(lambda comm: train(comm, [3], algorithm=Growing(), saved=saved))[0]
    assert [state["calls"] for _, state in after[3]["distributed"]["algorithm_state"]] == [4]


def test_ranks_that_count_differently_are_told():
    with pytest.raises(CollectiveError, match=r"state=of 1 to 1 calls.*state=new|state=new.*state=of 1 to 1 calls"):
        SimulatedWorld(2).run(lambda comm: train(comm, range(2), algorithm=Mistaken()))


def test_a_state_that_does_not_fit():
    """One that lacks a key is refused; of another bucket it gives way, and nothing is lost."""

    def body(comm):
        saved = train(comm, range(2), algorithm=Columns())
        state = saved[3]["distributed"]
        state = {**state, "algorithm_state": [(key, {}) for key, _ in state["algorithm_state"]]}
        emptied = *saved[:3], {**saved[3], "distributed": state}, saved[4]
        with pytest.raises(ValueError, match="the state of columns lacks pair, step: was it saved by another version"):
            train(comm, [2], algorithm=Columns(), saved=emptied)
        given, applied, rest, *_ = train(comm, range(2, 4), algorithm=Columns(), saved=saved, bucket_bytes=24)
        return saved[0] + given, applied, rest

    results = SimulatedWorld(2).run(body)
    given, rest = (sum(result[i] for result in results) for i in (0, 2))
    assert torch.equal(given, results[0][1] + rest)


def test_errors_name_the_rank_and_the_settings_of_the_others():
    def told(**options):
        def body(comm):
            with pytest.raises(CollectiveError) as error:
                train(
                    comm, [0], bad={0}, algorithm=ROUNDED, **{key: given[comm.rank] for key, given in options.items()}
                )
            return str(error.value)

        [text] = set(SimulatedWorld(2).run(body))
        return text

    assert "rank 1: the gradient of 'b' is not finite" in told()
    assert "per_unit=3" in told(options=[{}, {"per_unit": 3}])


def test_the_hook_takes_it():
    state = SparseHookState(Alone(), algorithm=named("mine"))
    assert state.algorithm == "mine"


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"algorithm": named("gtopk")}, ValueError, "'gtopk', which is another's"),
        ({"algorithm": named("powersgd")}, ValueError, "'powersgd', which is another's"),
        ({"algorithm": named(3)}, TypeError, "name of Mine is 3, expected text"),
        ({"algorithm": named("")}, ValueError, "Mine has no name: give it one"),
        ({"algorithm": Rounded}, TypeError, r"the class Rounded, expected one of it, as Rounded\(\)"),
        ({"algorithm": named("mine", schedule=DenseCompressor.schedule)}, TypeError, "Mine has no schedule"),
        (
            {"algorithm": named("mine", __init__=lambda self: None)},
            TypeError,
            "Mine has an __init__ of its own.*frozen",
        ),
        (
            {"algorithm": named("mine", __annotations__={"q": int}, q=2)},
            TypeError,
            "Mine declares q as no field.*frozen",
        ),
        ({"algorithm": ROUNDED, "options": {"k": 1}}, ValueError, "rounded has no option k; it takes: per_unit"),
        ({"algorithm": ROUNDED, "options": {"per_unit": 0.5}}, TypeError, "per_unit is 0.5"),
        ({"algorithm": ROUNDED, "options": {"per_unit": 0}}, ValueError, "expected 1 or more"),
        ({"algorithm": ROUNDED, "wire": "bf16"}, ValueError, "rounded has a wire of its own"),
        ({"algorithm": ROUNDED, "momentum": 0.9}, ValueError, "rounded selects nothing"),
        ({"algorithm": type("Mine", (GTopK,), {"name": "powersgd"})()}, ValueError, "'powersgd', which is another's"),
        (
            {"algorithm": type("Mine", (GTopK,), {"name": "mine", "selects": False})()},
            ValueError,
            "is a DenseCompressor",
        ),
    ],
)
def test_what_cannot_be_used(settings, error, says):
    model = nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(error, match=says):
        DistributedOptimizer(inner, model.named_parameters(), comm=Alone(), **settings)
    with pytest.raises(error, match=says):
        SparseHookState(Alone(), **settings)
