"""Ranks that die, leave and come while optimizers train, in simulated worlds: who is left has the same bits."""

import copy
import functools
from contextlib import nullcontext

import pytest
import torch
from communicators import CollectiveError, Dies, Elastic, SimulatedWorld
from data_parallel import DistributedOptimizer, SparseHookState, UpdateOptimizer, reshard_residuals
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_collectives import ALGORITHMS
from sparse_compress import TopK
from torch import nn

pytestmark = pytest.mark.quick

RANKS, STEPS = 4, 5
SHAPES = {"a": (7,), "b": (20, 3), "c": (12, 8)}
NUMEL = 7 + 60 + 96

SGD = functools.partial(torch.optim.SGD, lr=0.5, momentum=0.5)
PLAIN = functools.partial(torch.optim.SGD, lr=1.0)
ADAM = functools.partial(torch.optim.AdamW, lr=0.01)
GRADIENTS = {
    **{name: {"algorithm": name} for name in ALGORITHMS},
    "teams": {"algorithm": "spardl", "options": {"teams": 2}},
    "fp16": {"algorithm": "dense", "wire": "fp16"},
    "dense-int8": {"algorithm": "dense-int8"},
    "powersgd": {"algorithm": "powersgd", "options": {"dense_steps": 1}},
    "momentum": {"inner": PLAIN, "momentum": 0.9, "clip_norm": 0.5, "verify": 2},
    "small": {"inner": PLAIN, "dense_below": 10, "momentum": 0.5, "nonfinite": "skip"},
    "overlap": {"overlap": True, "bucket_bytes": 256, "clip_norm": 1.0},
    "overlapped powersgd": {
        "overlap": True,
        "bucket_bytes": 256,
        "algorithm": "powersgd",
        "options": {"dense_steps": 1},
    },
    "overlapped dense": {"overlap": True, "bucket_bytes": 256, "algorithm": "dense"},
}
UPDATES = {
    "updates": {"clip_norm": 0.5},
    "updates by spardl": {"algorithm": "spardl", "verify": 1},
    "updates of Adam": {"inner": ADAM},
    "updates of Adam by oktopk": {"inner": ADAM, "algorithm": "oktopk", "clip_norm": 0.5, "nonfinite": "skip"},
}
KINDS = {**GRADIENTS, **UPDATES}


def made(kind, model, world, **other):
    """Optimizer of that kind."""
    options = {**KINDS[kind], **other}
    wrapper, inner = UpdateOptimizer if kind in UPDATES else DistributedOptimizer, options.pop("inner", SGD)
    if not {"dense", "dense-int8", "powersgd"} & {options.get("algorithm")}:
        options.setdefault("compressor", TopK(0.1))
    return wrapper(inner(model.parameters()), model.named_parameters(), comm=world, **options)


def new_model(shapes=SHAPES):
    generator = torch.Generator().manual_seed(5)
    return nn.ParameterDict(
        {name: nn.Parameter(torch.randn(*shape, generator=generator)) for name, shape in shapes.items()}
    )


def gradient_of(place, step):
    return torch.randint(-99, 100, (NUMEL,), generator=torch.Generator().manual_seed(100 * step + place)) / 4


def take_step(optimizer, model, place, step):
    optimizer.zero_grad()
    with optimizer.ahead() if isinstance(optimizer, UpdateOptimizer) else nullcontext():
        torch.autograd.backward(nn.utils.parameters_to_vector(model.values()), gradient_of(place, step))
    optimizer.step()


def flat_of(tensors):
    return torch.cat([tensors[name].detach().flatten() for name in SHAPES]) if tensors else torch.zeros(NUMEL)


def inner_of(optimizer):
    """State of the wrapped optimizer."""
    state = optimizer.optimizer.state_dict()["state"]
    inner = [torch.as_tensor(v).flatten() for s in state.values() for v in s.values() if v is not None]
    return torch.cat(inner) if inner else torch.zeros(0)


def result_of(optimizer, model):
    """Everything of which survivors keep the bits."""
    kept = optimizer._exchange.error_state()
    parts = {what: flat_of(kept[what]).clone() for what in kept}
    return {"parameters": flat_of(model).clone(), **parts, "inner": inner_of(optimizer)}


def trained(comm, kind, *, leaver=-1, before=0, times=None, moved=None, **other):
    """A rank that trains; the leaver is not there from step `before` on."""
    comm.elapse(comm.rank * 1e-9)  # so ranks of the group are in their order
    world, model = Elastic(comm), new_model()
    optimizer = made(kind, model, world, **other)
    for step in range(STEPS):
        comm.elapse(1e-5)
        if comm.rank == leaver and step == before - 1:
            world.leave()
        if times is not None:
            times.append(comm.clock())
        was = flat_of(model)
        take_step(optimizer, model, comm.rank, step)
        if moved is not None:
            moved.setdefault(step, was - flat_of(model))
        if comm.rank == leaver and step == before - 1:
            break
    world.close()
    return result_of(optimizer, model)


@functools.cache
def left(kind, leaver, before, **other):
    """Results where a rank leaves before a step."""
    return SimulatedWorld(RANKS).run(lambda comm: trained(comm, kind, leaver=leaver, before=before, **other))


@functools.cache
def times_of(kind):
    """When the first and the last rank come to a step, and the end."""
    times = []
    world = SimulatedWorld(RANKS)
    world.run(lambda comm: trained(comm, kind, times=times))
    return sorted(times)[RANKS:], world.elapsed


def same(one, other):
    return all(torch.equal(one[what], other[what]) for what in one)


def left_before(kind, results, dead):
    """Step before which the dead rank might have left, for all that the survivors have."""
    for step in range(1, STEPS + 1):
        if all(same(a, b) for i, (a, b) in enumerate(zip(results, left(kind, dead, step), strict=True)) if i != dead):
            return step
    return None


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=8, deadline=None)
@given(at=st.floats(0, 1), dead=st.sampled_from([0, 2]))
def test_who_is_left_has_the_bits_as_if_the_dead_had_left_before(kind, at, dead):
    starts, end = times_of(kind)
    when = starts[RANKS] + at * (end - starts[RANKS])
    results = SimulatedWorld(RANKS, faults=[Dies(dead, at=when)]).run(lambda comm: trained(comm, kind))
    died = left_before(kind, results, dead)
    assert died is not None
    assert abs(died - sum(start < when for start in starts[::RANKS])) <= 1  # messages that tie are drawn anew


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["gtopk", "topk-dsa", "oktopk", "teams", "dense-int8", "powersgd", "small"])
@settings(max_examples=4, deadline=None)
@given(at=st.floats(0, 1), dead=st.sampled_from([0, 2]))
def test_nothing_is_lost_but_what_the_dead_had(kind, at, dead):
    other = {"inner": PLAIN, **({"momentum": 0.0} if kind == "small" else {})}
    starts, end = times_of(kind)
    when = starts[RANKS] + at * (end - starts[RANKS])
    moved = {}  # by step: the mean that was applied

    train = functools.partial(trained, kind=kind, moved=moved, **other)
    results = SimulatedWorld(RANKS, faults=[Dies(dead, at=when)]).run(train)
    of = [before for before in range(1, STEPS + 1) if same(results[1], wanted(kind, dead, before, other)[1])]
    assert of
    died = of[0]
    given_ = sum(gradient_of(p, s) for s in range(STEPS) for p in range(RANKS) if p != dead or s < died)
    applied = sum((RANKS if step < died else RANKS - 1) * moved[step] for step in range(STEPS))
    lost = wanted(kind, dead, died, other)[dead]["residuals"]
    kept = sum(result["residuals"] for place, result in enumerate(results) if place != dead)
    torch.testing.assert_close(applied + kept + lost, given_, rtol=0, atol=1e-2)


def wanted(kind, leaver, before, other):
    key = kind, leaver, before
    if key not in _WANTED:
        train = functools.partial(trained, kind=kind, leaver=leaver, before=before, **other)
        _WANTED[key] = SimulatedWorld(RANKS).run(train)
    return _WANTED[key]


_WANTED = {}
LONG = 14


def trained_with(comm, kind, arrives=0.0, joins=RANKS - 1, **other):
    """A rank that trains, the last of which comes later; everything by step, and what the newcomer began with."""
    if comm.rank == joins:
        comm.elapse(arrives)
    world, model = Elastic(comm, at_least=RANKS - 1), new_model()
    optimizer = made(kind, model, world, **other)
    began, history = (result_of(optimizer, model), optimizer.stats()["steps"]), {}
    while (step := optimizer.stats()["steps"]) < LONG:
        comm.elapse(1e-4)
        take_step(optimizer, model, comm.rank, step)
        history[step] = result_of(optimizer, model)
    world.close()
    return began, history


ARRIVES = 0.0065


@pytest.mark.slow
@pytest.mark.few(3)
@pytest.mark.parametrize("kind", KINDS)
def test_a_newcomer_has_what_the_others_have_but_an_empty_residual(kind):
    *others, ((began, first), history) = SimulatedWorld(RANKS).run(lambda comm: trained_with(comm, kind, ARRIVES))
    assert 0 < first <= LONG - 5, first
    assert not began["residuals"].any()
    assert not began["velocities"].any()
    assert any(torch.equal(began["inner"], other[first - 1]["inner"]) for _, other in others)
    for _, other in others:
        assert torch.equal(began["parameters"], other[first - 1]["parameters"])
        for step in range(first, LONG):
            assert torch.equal(history[step]["parameters"], other[step]["parameters"])
            assert kind in UPDATES or torch.equal(history[step]["inner"], other[step]["inner"])


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["gtopk", "momentum", "overlapped powersgd", "updates of Adam"])
@settings(max_examples=10, deadline=None)
@given(at=st.floats(0, 1), dead=st.integers(0, RANKS - 1))
def test_donor_or_newcomer_may_die_and_the_others_go_on(kind, at, dead):
    world = SimulatedWorld(RANKS, faults=[Dies(dead, at=ARRIVES * 0.9 + at * 0.006)])
    results = world.run(lambda comm: trained_with(comm, kind, ARRIVES))
    histories = [result[1] for place, result in enumerate(results) if place != dead]
    assert len(histories) == RANKS - 1
    for history in histories:
        assert LONG - 1 in history
        for step, kept in history.items():
            assert torch.equal(kept["parameters"], histories[0][step]["parameters"])


@pytest.mark.parametrize("other", [{"density": 0.2, "compressor": None}, {"algorithm": "oktopk"}, "model"])
def test_a_newcomer_of_another_kind_is_told_and_the_others_go_on(other):
    def body(comm):
        if comm.rank != RANKS - 1:
            return trained_with(comm, "gtopk")
        comm.elapse(ARRIVES)
        model = new_model({"a": (8,), "b": (20, 3)} if other == "model" else SHAPES)
        with pytest.raises(ValueError, match="other settings or another model"):
            made("gtopk", model, Elastic(comm, at_least=RANKS - 1), **({} if other == "model" else other))
        return None

    *others, _ = SimulatedWorld(RANKS).run(body)
    for _, history in others:
        assert torch.equal(history[LONG - 1]["parameters"], others[0][1][LONG - 1]["parameters"])


@pytest.mark.parametrize("kind", ["gtopk", "updates of Adam"])
def test_states_of_those_who_are_left_load_on_another_number_of_ranks(kind):
    def body(comm):
        comm.elapse(comm.rank * 1e-9)
        world, model = Elastic(comm), new_model()
        optimizer = made(kind, model, world)
        for step in range(STEPS):
            if comm.rank == 1 and step == 3:
                world.leave()
            take_step(optimizer, model, comm.rank, step)
            if comm.rank == 1 and step == 3:
                return None
        return optimizer.state_dict(), model.state_dict(), optimizer.gathered_state_dict()

    saved = [each for each in SimulatedWorld(RANKS).run(body) if each is not None]
    assert len(saved) == RANKS - 1

    def resumed(comm, states):
        world, model = Elastic(comm), new_model()
        model.load_state_dict(saved[0][1])
        optimizer = made(kind, model, world)
        optimizer.load_state_dict(copy.deepcopy(states[world.rank]))  # not the other rank's tensors
        take_step(optimizer, model, comm.rank, STEPS)
        return flat_of(model)

    for states in (reshard_residuals([state for state, *_ in saved], 2), reshard_residuals(saved[0][2], 2)):
        one, two = SimulatedWorld(2).run(lambda comm, states=states: resumed(comm, states))
        assert torch.equal(one, two)


def test_what_cannot_follow_ranks_that_come_and_go_is_refused():
    def body(comm):
        world, model = Elastic(comm), new_model()
        with pytest.raises(ValueError, match='algorithm="auto" chooses what is fastest'):
            made("gtopk", model, world, algorithm="auto")
        with pytest.raises(ValueError, match="power of two of teams"):
            made("gtopk", model, world, algorithm="spardl", options={"teams": 3, "sag": "r-sag"})
        with pytest.raises(TypeError, match="DDP cannot change its group"):
            SparseHookState(world)
        with pytest.raises(TypeError, match="Join counts the ranks of a fixed process group"):
            made("gtopk", model, world).join_hook()

    SimulatedWorld(3).run(body)


@pytest.mark.parametrize("kind", ["gtopk", "overlap", "powersgd", "updates", "updates of Adam"])
def test_a_step_that_is_not_finite_is_an_error_as_ever_and_leaves_what_was_kept(kind):
    def body(comm):
        world, model = Elastic(comm), new_model()
        optimizer = made(kind, model, world)
        take_step(optimizer, model, comm.rank, 0)
        before = result_of(optimizer, model)
        optimizer.zero_grad()
        with pytest.raises(CollectiveError, match="is not finite"):  # noqa: PT012 - one step
            with optimizer.ahead() if isinstance(optimizer, UpdateOptimizer) else nullcontext():
                nan = torch.full((NUMEL,), torch.nan if comm.rank == 1 else 1.0)
                torch.autograd.backward(nn.utils.parameters_to_vector(model.values()), nan)
            optimizer.step()
        after = result_of(optimizer, model)
        assert all(torch.equal(before[what], after[what]) for what in ("parameters", "residuals", "velocities"))
        take_step(optimizer, model, comm.rank, 1)
        return world.generation, flat_of(model)

    results = SimulatedWorld(3).run(body)
    assert all(generation == 1 and torch.equal(flat, results[0][1]) for generation, flat in results)


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("falls", ["chained", "from the first rate"])
def test_a_newcomers_scheduler_goes_on_with_the_others(overlap, falls):
    """Also where groups' settings are compared, every 100 steps; of what is carried each gets its own state."""
    schedules = torch.optim.lr_scheduler

    def body(comm):
        if comm.rank == RANKS - 1:
            comm.elapse(ARRIVES)
        model, world, rates = new_model(SHAPES), Elastic(comm), {}
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(
            inner, model.named_parameters(), comm=world, density=0.5, overlap=overlap, verify=1
        )
        if falls == "chained":
            scheduler = schedules.ExponentialLR(optimizer, 0.9)
        else:
            scheduler = schedules.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        world.carry(other := nn.Linear(1, 1))
        world.carry(scheduler)
        while (step := int(optimizer.stats()["steps"])) < 120:
            comm.elapse(0.001)
            rates[step] = scheduler.get_last_lr()[0], optimizer.param_groups[0]["lr"], other.weight.item()
            sum(p.square().sum() for p in model.parameters()).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        return rates

    first, *_, newcomer = SimulatedWorld(RANKS).run(body)
    assert 20 < len(newcomer) < 120
    assert all(first[step] == rates for step, rates in newcomer.items())


def test_a_newcomer_whose_scheduler_is_not_carried_is_told_at_once():
    """Replicas went apart until the hundredth step."""

    def body(comm):
        if comm.rank == RANKS - 1:
            comm.elapse(ARRIVES)
        model = new_model(SHAPES)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(inner, model.named_parameters(), comm=Elastic(comm), density=0.5)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

        def train():
            for _ in range(90):
                comm.elapse(0.001)
                sum(p.square().sum() for p in model.parameters()).backward()
                optimizer.step()
                scheduler.step()

        with pytest.raises(CollectiveError, match=r"get a scheduler's state by Elastic\.carry"):
            train()
        return True

    assert SimulatedWorld(RANKS).run(body) == [True] * RANKS


def test_a_second_optimizer_on_one_elastic_is_refused():
    def body(comm):
        world = Elastic(comm, start_with=RANKS)
        model = new_model(SHAPES)
        first, second = made("gtopk", model, world), made("gtopk", new_model(SHAPES), world)
        sum(p.square().sum() for p in model.parameters()).backward()
        with pytest.raises(ValueError, match="belongs to a later DistributedOptimizer"):
            first.step()
        return second.comm is world

    assert SimulatedWorld(RANKS).run(body) == [True] * RANKS


def test_a_checkpoint_that_a_newcomer_loads_is_refused_there_and_the_others_go_on():
    def body(comm):
        if comm.rank != RANKS - 1:
            return trained_with(comm, "gtopk")
        comm.elapse(ARRIVES)
        optimizer = made("gtopk", new_model(SHAPES), Elastic(comm, at_least=RANKS - 1))
        with pytest.raises(RuntimeError, match="has the state of those who train"):
            optimizer.load_state_dict(optimizer.state_dict())
        return None

    *others, _ = SimulatedWorld(RANKS).run(body)
    for _, history in others:
        assert torch.equal(history[LONG - 1]["parameters"], others[0][1][LONG - 1]["parameters"])


@pytest.mark.parametrize("kind", ["small", "updates of Adam by oktopk"])
def test_a_newcomer_after_a_skipped_step_agrees_with_the_others(kind):
    def body(comm):
        comm.elapse(comm.rank * 1e-9 + (0.02 if comm.rank == 3 else 0.0))
        world = Elastic(comm) if comm.rank == 3 else Elastic(comm, start_with=3)
        model = new_model()
        optimizer, sizes = made(kind, model, world), []
        for step in range(optimizer.stats()["steps"], 60):
            comm.elapse(1e-3)
            optimizer.zero_grad()
            with optimizer.ahead() if kind in UPDATES else nullcontext():
                x = torch.nn.utils.parameters_to_vector(model.values())
                torch.autograd.backward(x, gradient_of(comm.rank, step))
            if (step, comm.rank) == (5, 1):
                model["a"].grad[0] = torch.inf
            optimizer.step()
            sizes.append(world.size)
        world.close()
        return optimizer.skipped, sizes[-1], flat_of(model)

    found = SimulatedWorld(RANKS).run(body)
    assert [(skipped, size) for skipped, size, _ in found] == [(1, RANKS)] * RANKS
    assert all(torch.equal(x, found[0][2]) for *_, x in found)
