"""dense_below=: tensors of fewer elements are summed whole, beside the selection from the others."""

import copy
from contextlib import nullcontext

import communicators
import pytest
import torch
from communicators import CollectiveError, Link, SimulatedWorld
from data_parallel import DistributedOptimizer, SparseHookState, UpdateOptimizer, exchange, reshard_residuals
from hypothesis import given
from hypothesis import strategies as st
from sparse_collectives import ALGORITHMS
from torch import nn

pytestmark = pytest.mark.quick

SHAPES = {"a": (3, 4), "b": (5,), "c": (1,), "d": (2, 3)}  # below 6: b and c
SPARSE = [name for name, entry in ALGORITHMS.items() if entry.selects]
EXACT = {"lr": 1.0}


def made(comm, *, optimizer=EXACT, dense_below=6, kind=DistributedOptimizer, **options):
    model = nn.ParameterDict({name: nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()})
    inner = torch.optim.SGD(model.parameters(), **optimizer)
    return model, kind(inner, model.named_parameters(), comm=comm, dense_below=dense_below, **options)


def give(model, comm, step, seed=0, missing=()):
    """Integer gradients, some of them None."""
    generator = torch.Generator().manual_seed(1000 * seed + 10 * step + comm.rank)
    for name, p in model.items():
        gradient = torch.randint(-9, 10, p.shape, generator=generator).float()
        p.grad = None if (comm.rank, name) in missing else gradient


def flat(tensors):
    return torch.cat([tensors[name].detach().reshape(-1) for name in SHAPES])


def residuals(optimizer):
    return optimizer.state_dict()["distributed"]["residuals"]


@pytest.mark.few(3)
@pytest.mark.parametrize("name", SPARSE)
@given(
    size=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 99),
    steps=st.integers(1, 5),
    density=st.sampled_from([0.01, 0.2, 1.0]),
    dense_below=st.sampled_from([0, 2, 6, 7, 99]),
    bucket_bytes=st.sampled_from([None, 1, 24, 60]),
    kind=st.sampled_from([DistributedOptimizer, UpdateOptimizer]),
    missing=st.sets(st.tuples(st.integers(0, 3), st.sampled_from(list(SHAPES)))),
)
def test_nothing_is_lost_and_what_is_tiny_never_waits(name, size, seed, steps, missing, dense_below, **options):
    """Σ gradients = P · Σ applied + Σ residuals, exactly; ranks agree; no residual of what is tiny."""

    def body(comm):
        model, optimizer = made(comm, algorithm=name, dense_below=dense_below, **options)
        total = torch.zeros(24)
        for step in range(steps):
            with optimizer.ahead() if options["kind"] is UpdateOptimizer else nullcontext():
                give(model, comm, step, seed, missing)
            total += flat({key: torch.zeros_like(p) if p.grad is None else p.grad for key, p in model.items()})
            optimizer.step()
        return total, flat(model), residuals(optimizer)

    results = SimulatedWorld(size).run(body)
    way = 1 if options["kind"] is DistributedOptimizer else -1  # updates go against gradients
    total = way * sum(own for own, _, _ in results)
    for _, parameters, kept in results:
        assert torch.equal(total, -way * size * parameters + sum(flat(other) for _, _, other in results))
        for key, shape in SHAPES.items():
            assert torch.Size(shape).numel() >= dense_below or not kept[key].any()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_bytes_are_the_selections_and_those_of_a_dense_sum_of_what_is_tiny(size):
    """Of gtopk, whose k is of all elements: 6 elements beside it are what they are alone."""

    def sent(dense_below, dense=False):
        world = SimulatedWorld(size)

        def body(comm):
            if dense:
                p = nn.Parameter(torch.zeros(6))
                optimizer = DistributedOptimizer(
                    torch.optim.SGD([p], lr=1.0), [("p", p)], comm=comm, algorithm="dense", overlap=True
                )
                before = world.bytes_sent[comm.rank]
                p.grad = torch.ones(6)
            else:
                model, optimizer = made(comm, density=0.2, dense_below=dense_below)
                before = world.bytes_sent[comm.rank]
                give(model, comm, 0)
            optimizer.step()
            return world.bytes_sent[comm.rank] - before

        return world.run(body)

    together = sent(6)
    assert together == [one + other for one, other in zip(sent(0), sent(0, dense=True), strict=True)]


@pytest.mark.parametrize("kind", [DistributedOptimizer, UpdateOptimizer])
def test_what_is_tiny_is_under_way_while_the_selection_is(kind):
    """So that its messages add their bytes to a step, and not their latency."""

    def body(comm):
        model, optimizer = made(comm, kind=kind, density=0.2)
        with optimizer.ahead() if kind is UpdateOptimizer else nullcontext():
            give(model, comm, 0)
        begun, start = [], optimizer._exchange.start
        optimizer._exchange.start = lambda *given, **more: begun.append(start(*given, **more)) or begun[-1]
        optimizer.step()
        return [[(work.began, work.ended) for work in mean.works] for mean in begun]

    for ((began, ended), (also_began, also_ended)), *others in SimulatedWorld(4, link=Link(1e-3, 0.0)).run(body):
        assert not others
        assert began == also_began < min(ended, also_ended)


@pytest.mark.parametrize("size", [1, 2])
def test_where_the_second_call_cannot_be_started_the_first_is_over_before_the_error(size, monkeypatch):
    fails, works = set(range(size)), {rank: [] for rank in range(size)}

    def start(schedule, comm, *, facts, device):
        if facts.startswith("sum beside") and comm.rank in fails:
            raise CollectiveError("no more of it")
        works[comm.rank].append(communicators.start(schedule, comm, facts=facts, device=device))
        return works[comm.rank][-1]

    def body(comm):
        model, optimizer = made(comm, density=0.2)
        give(model, comm, 0)
        with pytest.raises(CollectiveError, match="no more of it"):
            optimizer.step()
        assert [work.ended is not None for work in works[comm.rank]] == [True]
        fails.discard(comm.rank)
        give(model, comm, 1)
        optimizer.step()
        return flat(model)

    monkeypatch.setattr(exchange, "start", start)
    one, *others = SimulatedWorld(size).run(body)
    assert all(torch.equal(one, other) for other in others)


@pytest.mark.parametrize("size", [1, 3])
def test_where_all_is_tiny_it_is_plain_momentum(size):
    def body(comm):
        model, optimizer = made(comm, dense_below=99, momentum=0.9, optimizer={"lr": 0.1})
        whole, plain = made(comm, dense_below=0, algorithm="dense", optimizer={"lr": 0.1, "momentum": 0.9})
        for step in range(5):
            for this, takes in ((model, optimizer), (whole, plain)):
                give(this, comm, step)
                takes.step()
        return flat(model), flat(whole)

    torch.testing.assert_close(*SimulatedWorld(size).run(body)[0])


@pytest.mark.parametrize("missing", SHAPES)
def test_a_tiny_tensor_without_a_gradient_changes_no_other(missing):
    """Where what is unused waits, as it does in the hook of DDP."""

    def body(comm, absent):
        model, optimizer = made(comm, dense_below=99, momentum=0.9)
        optimizer._exchange._withholds = True
        for step in range(4):
            give(model, comm, step, missing=absent if step % 2 else ())
            optimizer.step()
        return {name: p.detach() for name, p in model.items() if name != missing}

    world = SimulatedWorld(2)
    without, everything = (world.run(lambda comm, a=a: body(comm, a)) for a in ({(0, missing), (1, missing)}, ()))
    assert all(torch.equal(without[0][name], p) for name, p in everything[0].items())


def train(comm, steps, saved=None, **options):
    model, optimizer = made(comm, density=0.1, momentum=0.9, optimizer={"lr": 0.1}, **options)
    if saved is not None:
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
    for step in steps:
        give(model, comm, step)
        optimizer.step()
    return copy.deepcopy((model.state_dict(), optimizer.state_dict()))


@pytest.mark.parametrize("bucket_bytes", [None, 24])
def test_resumed_runs_end_in_the_same_bits(bucket_bytes):
    world = SimulatedWorld(3)
    whole = world.run(lambda comm: train(comm, range(6), bucket_bytes=bucket_bytes))
    half = world.run(lambda comm: train(comm, range(3), bucket_bytes=bucket_bytes))
    rest = world.run(lambda comm: train(comm, range(3, 6), half[comm.rank], bucket_bytes=bucket_bytes))
    for one, other in zip(whole, rest, strict=True):
        assert torch.equal(flat(one[0]), flat(other[0]))
        for memory in ("residuals", "velocities"):
            assert torch.equal(flat(one[1]["distributed"][memory]), flat(other[1]["distributed"][memory]))
    assert half[0][1]["distributed"]["velocities"]["b"].any()


def test_another_limit_on_resume_loses_nothing():
    """What waited in a residual before it was sent whole is still sent, by selection."""

    def body(comm):
        model, optimizer = made(comm, dense_below=0, density=0.05)
        give(model, comm, 0)
        total = flat({key: p.grad for key, p in model.items()})
        optimizer.step()
        state, left = optimizer.state_dict(), residuals(optimizer)["b"].clone()
        other, optimizer = made(comm, dense_below=6, density=1.0)
        other.load_state_dict(model.state_dict())
        optimizer.load_state_dict(state)
        give(other, comm, 1)
        total += flat({key: p.grad for key, p in other.items()})
        optimizer.step()
        return total, flat(other), flat(residuals(optimizer)), left

    results = SimulatedWorld(2).run(body)
    assert any(left.any() for *_, left in results)
    total = -sum(own for own, *_ in results)
    for _, parameters, rest, _ in results:
        assert not rest.any()
        assert torch.equal(total, 2 * parameters)


def test_another_number_of_ranks_has_the_same_to_apply():
    saved = SimulatedWorld(2).run(lambda comm: train(comm, range(4)))
    states = reshard_residuals([state for _, state in saved], 3)
    for memory in ("residuals", "velocities"):
        before = sum(flat(state["distributed"][memory]) for _, state in saved) / 2
        after = sum(flat(state["distributed"][memory]) for state in states) / 3
        torch.testing.assert_close(before, after)
    SimulatedWorld(3).run(lambda comm: train(comm, range(2), (saved[0][0], states[comm.rank])))


@pytest.mark.parametrize("bad", ["a", "b"])
def test_a_step_that_is_skipped_leaves_no_trace(bad):
    def body(comm):
        model, optimizer = made(comm, density=0.1, momentum=0.9, nonfinite="skip")
        give(model, comm, 0)
        optimizer.step()
        before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["distributed"]))
        give(model, comm, 1)
        if comm.rank == 1:
            model[bad].grad.view(-1)[0] = torch.inf
        optimizer.step()
        after = model.state_dict(), optimizer.state_dict()["distributed"]
        assert optimizer.skipped == 1
        assert torch.equal(flat(before[0]), flat(after[0]))
        for memory in ("residuals", "velocities"):
            assert torch.equal(flat(before[1][memory]), flat(after[1][memory]))

    SimulatedWorld(2).run(body)


@pytest.mark.parametrize("bad", ["a", "b"])
def test_what_is_not_finite_is_named(bad):
    def body(comm):
        model, optimizer = made(comm)
        give(model, comm, 0)
        if comm.rank == 1:
            model[bad].grad.view(-1)[0] = torch.nan
        with pytest.raises(CollectiveError, match=f"rank 1: the gradient of '{bad}' is not finite"):
            optimizer.step()

    SimulatedWorld(2).run(body)


def test_ranks_with_other_limits_are_told():
    def body(comm):
        made(comm, dense_below=6 if comm.rank else 0)

    with pytest.raises(CollectiveError, match="dense_below=6"):
        SimulatedWorld(2).run(body)


@pytest.mark.parametrize("algorithm", ["dense", "powersgd", "dense-int8"])
def test_where_nothing_is_selected_it_is_refused(algorithm):
    p = nn.Parameter(torch.zeros(3))
    with pytest.raises(ValueError, match="dense_below=6 is for algorithms that select"):
        DistributedOptimizer(torch.optim.SGD([p], lr=0.1), [("p", p)], algorithm=algorithm, dense_below=6)
    with pytest.raises(ValueError, match="dense_below=6 is for algorithms that select"):
        SparseHookState(algorithm=algorithm, dense_below=6)


@pytest.mark.parametrize(("given", "error"), [(-1, ValueError), (0.5, TypeError), (True, TypeError)])
def test_what_is_no_count(given, error):
    with pytest.raises(error, match="dense_below"):
        SparseHookState(dense_below=given)
