"""Checkpoints: the same bits as uninterrupted, and another number of ranks."""

import io

import pytest
import torch
from communicators import CollectiveError, SimulatedWorld
from data_parallel import DistributedOptimizer, UpdateOptimizer, reshard_residuals
from data_parallel.state_dict import ERROR_STATE, check_fit
from sparse_collectives import ALGORITHMS
from sparse_compress import RandomK, TopK
from torch import nn

pytestmark = [pytest.mark.quick, pytest.mark.filterwarnings("ignore:Adam behind a sparse", "ignore:momentum= and Adam")]


def make(comm, *, name="gtopk", inner=torch.optim.Adam, compressor=TopK, **options):
    model = nn.ParameterDict({key: nn.Parameter(torch.zeros(shape)) for key, shape in {"a": (2, 3), "b": (4,)}.items()})
    optimizer = DistributedOptimizer(
        inner(model.parameters(), lr=0.5),
        model.named_parameters(),
        comm=comm,
        algorithm=name,
        compressor=compressor(0.3),
        **options,
    )
    return model, optimizer


def train(model, optimizer, rank, steps):
    for step in steps:
        generator = torch.Generator().manual_seed(17 * step + rank)
        for p in model.values():
            p.grad = torch.randint(-9, 10, p.shape, generator=generator).float()
        optimizer.step()


def saved(state):
    """Through a file, as tensors and plain values only."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def flat(model):
    return torch.cat([p.detach().view(-1) for p in model.values()])


@pytest.mark.slow
@pytest.mark.few(7)
@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("options", [{}, {"nonfinite": "skip"}, {"bucket_bytes": 16}, {"compressor": RandomK}])
def test_resumed_runs_end_in_the_same_bits(name, momentum, options):
    entry = ALGORITHMS[name]
    if "compressor" in options and (entry.prescribes or not entry.selects):
        options = {}  # it has no use for another selection
    options = {**options, "momentum": momentum if entry.selects else 0.0}

    def whole(comm):
        model, optimizer = make(comm, name=name, **options)
        train(model, optimizer, comm.rank, range(6))
        return flat(model)

    def interrupted(comm):
        model, optimizer = make(comm, name=name, **options)
        train(model, optimizer, comm.rank, range(3))
        state, weights = saved(optimizer.state_dict()), saved(model.state_dict())
        model, optimizer = make(comm, name=name, **options)
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        train(model, optimizer, comm.rank, range(3, 6))
        return flat(model)

    for one, other in zip(SimulatedWorld(3).run(whole), SimulatedWorld(3).run(interrupted), strict=True):
        assert torch.equal(one, other)


def test_residuals_are_kept_by_parameter_so_buckets_may_change():
    def body(comm):
        model, optimizer = make(comm)
        train(model, optimizer, comm.rank, range(3))
        state = saved(optimizer.state_dict())
        _, other = make(comm, bucket_bytes=16)
        other.load_state_dict(state)
        one, two = state["distributed"]["residuals"], other.state_dict()["distributed"]["residuals"]
        assert one.keys() == two.keys() == {"a", "b"}
        assert all(one[name].any() and torch.equal(one[name], two[name]) for name in one)

    SimulatedWorld(2).run(body)


def test_a_state_from_before_the_first_step():
    def body(comm):
        model, optimizer = make(comm)
        optimizer.load_state_dict(saved(optimizer.state_dict()))
        train(model, optimizer, comm.rank, range(1))

    SimulatedWorld(2).run(body)


def states_after(size, steps, **options):
    def body(comm):
        model, optimizer = make(comm, inner=torch.optim.SGD, **options)
        train(model, optimizer, comm.rank, range(steps))
        return saved(optimizer.state_dict())

    return SimulatedWorld(size).run(body)


def pending(states, part="residuals"):
    """What is still to be applied: Σ over ranks / P."""
    tensors = [torch.cat([t.view(-1) for t in state["distributed"][part].values()]) for state in states]
    return sum(tensors) / len(tensors)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4), (4, 1), (1, 8), (3, 6), (4, 4)])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_another_number_of_ranks_still_has_the_same_to_apply(before, after, momentum):
    states = states_after(before, 3, momentum=momentum)
    resharded = reshard_residuals(states, after)
    assert len(resharded) == after
    assert torch.equal(pending(resharded), pending(states))
    if momentum:
        assert torch.equal(pending(resharded, "velocities"), pending(states, "velocities"))

    def body(comm):
        model, optimizer = make(comm, inner=torch.optim.SGD, momentum=momentum)
        optimizer.load_state_dict(resharded[comm.rank])
        train(model, optimizer, comm.rank, range(2))
        return flat(model)

    results = SimulatedWorld(after).run(body)
    assert all(torch.equal(result, results[0]) for result in results)


def test_old_rank_r_goes_to_rank_r_mod_the_new_size_times_new_over_old():
    states = states_after(4, 2)
    new = reshard_residuals(states, 2)[1]["distributed"]["residuals"]["a"]
    old = [state["distributed"]["residuals"]["a"] for state in states]
    assert torch.equal(new, (old[1] + old[3]) / 2)


def test_residuals_are_dropped_as_asked():
    states = states_after(4, 2, momentum=0.5)
    dropped = reshard_residuals(states, 2, drop=True)
    assert not pending(dropped).any()
    assert not pending(dropped, "velocities").any()
    assert pending(states).any()


@pytest.mark.parametrize(
    ("choose", "size"), [(lambda s: s[:2], 2), (lambda s: s[::-1], 2), (lambda s: [], 2), (lambda s: s, 0)]
)
def test_states_that_do_not_belong_together(choose, size):
    with pytest.raises(ValueError, match="the states of all ranks of one run in rank order"):
        reshard_residuals(choose(states_after(3, 1)), size)


@pytest.mark.parametrize(
    ("size", "change", "says"),
    [
        (1, lambda state: None, "of 2 ranks, but there are 1 now.*reshard_residuals"),
        (2, lambda state: state["distributed"].update(rank=1), "the state of rank 1 given to rank 0"),
        (2, lambda state: state.pop("distributed"), "expected one of a DistributedOptimizer"),
        (2, lambda state: state["distributed"].pop("rank"), r"the state lacks \['rank'\]: it was cut"),
        (
            2,
            lambda state: state["distributed"]["residuals"].pop("a"),
            r"only the checkpoint, or only the model, has \['a'\]",
        ),
        (2, lambda state: state["distributed"]["residuals"].update(b=torch.zeros(1)), r"b: \(1,\), not \(4,\)"),
        (2, lambda state: state["distributed"]["velocities"].update(state["distributed"]["residuals"]), "velocities"),
    ],
)
def test_states_that_do_not_fit_change_nothing(size, change, says):
    state = states_after(2, 2)[0]
    change(state)

    def body(comm):
        if comm.rank:
            return make(comm)
        _, optimizer = make(comm, inner=torch.optim.SGD)
        with pytest.raises(ValueError, match=says):
            optimizer.load_state_dict(state)
        return optimizer.state_dict()["distributed"]["residuals"]

    assert not any(residual.any() for residual in SimulatedWorld(size).run(body)[0].values())


def test_dense_does_not_swallow_residuals():
    state = states_after(1, 2)[0]
    _, optimizer = make(None, name="dense", inner=torch.optim.SGD)
    with pytest.raises(ValueError, match="residuals, which a dense exchange has no use for"):
        optimizer.load_state_dict(state)
    optimizer.load_state_dict(reshard_residuals([state], 1, drop=True)[0])


def test_dense_does_not_swallow_momenta_without_residuals():
    model, optimizer = make(None, inner=torch.optim.SGD, momentum=0.9)
    train(model, optimizer, 0, range(2))
    state = saved(optimizer.state_dict())
    for residual in state["distributed"]["residuals"].values():
        residual.zero_()
    _, dense = make(None, name="dense", inner=torch.optim.SGD)
    with pytest.raises(ValueError, match="velocities, which a dense exchange has no use for"):
        dense.load_state_dict(state)


@pytest.mark.parametrize("kind", [DistributedOptimizer, UpdateOptimizer])
def test_a_state_that_only_one_rank_loads_is_told(kind):
    def body(comm):
        model = nn.ParameterDict({"a": nn.Parameter(torch.ones(20))})

        def new():
            inner = torch.optim.SGD(model.parameters(), lr=0.1)
            return kind(inner, model.named_parameters(), comm=comm, density=0.2)

        def loss():
            model["a"].grad = torch.arange(20.0)

        optimizer = new()
        optimizer.step(loss)
        state, other = optimizer.state_dict(), new()
        if comm.rank == 0:
            other.load_state_dict(state)
        with pytest.raises(CollectiveError, match="with a state of 1 steps loaded"):
            other.step(loss)

    SimulatedWorld(2).run(body)


def test_a_state_of_another_optimizer_is_told_when_it_is_loaded():
    model = nn.ParameterDict({"a": nn.Parameter(torch.ones(20))})

    def wrapped(kind):
        return UpdateOptimizer(kind(model.parameters(), lr=0.1), model.named_parameters())

    state = wrapped(torch.optim.AdamW).state_dict()
    other = wrapped(torch.optim.SGD)
    with pytest.raises(ValueError, match=r"lacks .*'momentum'.*, which a SGD has, and has \['amsgrad'"):
        other.load_state_dict(state)
    assert "momentum" in other.param_groups[0]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("algorithm", 3),
        ("algorithm_state", {}),
        ("steps", "three"),
        ("steps", -1),
        ("skipped", None),
        ("residuals", []),
        ("residuals", {"a": [0.0] * 6, "b": torch.zeros(4)}),
        ("residuals", {"a": torch.zeros(2, 3, dtype=torch.int64), "b": torch.zeros(4)}),
    ],
)
def test_a_damaged_value_is_refused_by_its_name(key, value):
    """Before anything is loaded."""

    def body(comm):
        model, optimizer = make(comm)
        train(model, optimizer, comm.rank, range(2))
        before, state = optimizer.state_dict(), saved(optimizer.state_dict())
        state["distributed"][key] = value
        with pytest.raises(ValueError, match=rf"{key} .*damaged"):
            optimizer.load_state_dict(state)
        assert str(optimizer.state_dict()) == str(before)

    SimulatedWorld(2).run(body)


@pytest.mark.parametrize("named", [True, False])
def test_parameters_by_name_are_no_parameters_by_number(named):
    """As two SparseHookStates save them."""
    by_name, by_number = {"a": torch.zeros(2)}, {"parameter 0": torch.zeros(2)}
    own, shapes = (by_number, by_name) if named else (by_name, by_number)
    said = "was saved without named_parameters" if named else "was saved with named_parameters"
    with pytest.raises(ValueError, match=said):
        check_fit(dict.fromkeys(ERROR_STATE, own), {name: tensor.shape for name, tensor in shapes.items()})
