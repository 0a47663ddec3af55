"""DiLoCo by rounds over an `Elastic`: who lives goes on alike, nothing of the living is lost, newcomers come in."""

import copy
import random
from collections import defaultdict
from functools import partial

import pytest
import torch
from communicators import CollectiveError, Dies, Elastic, LeftOutError, LinkLost, Path, SimulatedWorld
from communicators.elastic import transfer
from local_sgd import DiLoCo, StreamingDiLoCo
from partial_collectives import EagerSGD, PartialAllreduce

PLAIN = partial(torch.optim.SGD, lr=1.0)
SECONDS = [1e-3, 2e-3, 8e-3]
pytestmark = pytest.mark.quick


class Log:
    """What outlives the ranks of a world: steps by rank, what all hold when they have met, sums that rounds gave."""

    def __init__(self, size):
        self.steps, self.sizes, self.met = [0] * size, set(), defaultdict(list)
        self.over = False
        self.totals = [defaultdict(float) for _ in range(size)]
        self.residuals, self.began, self.grew = (
            [],
            {},
            0,
        )  # steps of rank 0 when a rank began, and before all were there


class Recording(PartialAllreduce):
    """Adds up what it returns, by fragment."""

    def __init__(self, like, comm, totals, **rounds):
        super().__init__(like, comm, **rounds)
        self.totals = totals

    def _taken(self, *args, **kwargs):
        results = super()._taken(*args, **kwargs)
        for one in results:
            self.totals[one.fragment] = self.totals[one.fragment] + torch.cat(one.total)
        return results


def counting(
    comm, log, *, late=0.0, steps=12, ends=None, seed=0, drains=False, leaves=-1, streams=False, width=1, **rounds
):
    """Takes so many steps, which take drawn times; each counts itself in both tensors. None: not let in."""
    draw = random.Random(f"{seed}/{comm.rank}")
    comm.elapse(late)
    world = Elastic(comm, timeout=0.5, patience=3.0)
    dtype = torch.float32 if "compress" in rounds else torch.float64
    model = torch.nn.ParameterDict({name: torch.zeros(comm.size, width, dtype=dtype) for name in "ab"})
    make = partial(Recording, totals=log.totals[comm.rank], **rounds)
    options = {"sync_every": 4, "outer": PLAIN, "comm": world, "allreduce": make, "broadcast": True}
    options |= {"fragments": 2, "delay": 0, "alpha": 0.0} if streams else {}
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    try:
        if not world.newcomer and log.over:  # it would begin a training of its own
            return None
        optimizer = (StreamingDiLoCo if streams else DiLoCo)(inner, model=model, **options)
    except TimeoutError:
        return None
    assert all(torch.equal(part.gather(), part["anchor"]) for part in optimizer._driver.parts)  # a newcomer's, too
    assert optimizer._driver.block.done == 0  # its block begins, amid whichever block of others it came
    log.began[comm.rank] = log.steps[0]
    period = drains.get(comm.rank, 0) if isinstance(drains, dict) else 5 * drains
    for number in range((ends or {}).get(comm.rank, steps)):
        comm.elapse(draw.choice(SECONDS))
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
            p.grad[comm.rank] = torch.arange(1, width + 1)
        optimizer.step()
        log.steps[comm.rank] += 1
        if number == leaves:
            world.leave()
        optimizer.average()
        if world.leaving and not optimizer._driver.drained:
            continue
        if world.leaving:
            optimizer.admit()
            return None
        if comm.rank == 0 and world.size < comm.size:
            log.grew = log.steps[0]
        log.sizes.add(world.size)
        if period and (number + 1) % period == 0:
            optimizer.drain()
            log.met[optimizer._driver._elastic.number].append([p.tolist() for p in model.parameters()])
    optimizer.finish()
    log.over = True
    if "compress" in rounds:
        log.residuals.append(torch.cat([one for each in optimizer._driver._rounds.residuals for one in each]))
    return [p.tolist() for p in model.parameters()], world.generation, optimizer._driver._elastic.number


def check(size, faults, late, seed, *, jitter=2e-4, **options):
    """Runs a world, and looks at its laws; returns the outcomes and the log."""
    log, replay = Log(size), f"{size=}, {faults=}, {late=}, {seed=}, {jitter=}, {options=}"
    world = SimulatedWorld(size, seed=seed, jitter=jitter, faults=faults)
    outcomes = world.run(lambda comm: counting(comm, log, late=late.get(comm.rank, 0.0), seed=seed, **options))
    for held in log.met.values():
        assert all(one == held[0] for one in held), replay
    left = {rank: outcome for rank, outcome in enumerate(outcomes) if outcome is not None}
    assert len(set(map(str, left.values()))) <= 1, replay
    for judge in sorted(set(left) - set(late)):  # who has seen all rounds
        for fragment, total in log.totals[judge].items():
            counts = total.view(-1, size).max(0).values if fragment == 0 and not options.get("streams") else total
            for rank, number in enumerate(log.steps):
                given = float(counts[rank])
                assert given == pytest.approx(number) if rank in left else given <= number + 1e-6, replay
    return outcomes, log


def drawn(size, seed):
    """Deaths and late ranks of a seed; deaths between two messages, or at any time."""
    draw = random.Random(f"plan {seed}")
    late = {rank: draw.uniform(0, 0.06) for rank in range(1, size) if draw.random() < 0.4}
    faults = []
    for rank in draw.sample(range(size), draw.randint(0, size - 1)):
        at = draw.random() < 0.5
        faults.append(Dies(rank, at=draw.uniform(1e-3, 0.1)) if at else Dies(rank, message=draw.randint(1, 150)))
    options = {
        "quorum": draw.choice(["solo", "majority", 2, size]),
        "max_staleness": draw.randint(0, 3),
        "grace": draw.choice([0.0, 1e-3]),
        "drains": draw.random() < 0.5,
        "streams": draw.random() < 0.5,
    }
    return faults, late, {**options, "jitter": draw.choice([0.0, 2e-4, 5e-3])}


@pytest.mark.few(2)
@pytest.mark.parametrize("size", [2, 3, 5, 8])
@pytest.mark.parametrize("part", range(4))
def test_ranks_come_and_die_and_those_that_live_agree_and_lose_nothing(size, part):
    for seed in range(5 * part, 5 * part + 5):
        faults, late, options = drawn(size, seed)
        check(size, faults, late, seed, **options)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("quorum", ["solo", "majority", 3])
def test_a_newcomer_is_let_in_without_being_asked_for(streams, quorum):
    outcomes, log = check(3, [], {2: 0.02}, 1, steps=40, quorum=quorum, streams=streams)
    assert None not in outcomes
    assert log.sizes == {2, 3}
    assert log.steps[2] == 40


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("how", ["ends", "drains"])
def test_a_newcomer_comes_while_one_waits_for_the_others(how, first, streams):
    """It has ended, or drains, which the others do much later."""
    at = {first: 7} if how == "ends" else {first: 7, 1 - first: 60}
    outcomes, log = check(3, [], {2: 0.05}, 1, steps=60, **{how: at}, streams=streams)
    assert None not in outcomes
    assert log.steps == [7 if how == "ends" and rank == first else 60 for rank in range(3)]
    assert log.sizes == {2, 3}


@pytest.mark.parametrize("streams", [False, True])
def test_others_train_on_while_a_newcomer_takes_over_their_state(streams, monkeypatch):
    """It has all rounds since then, and so the same bits as they have, when it begins."""
    monkeypatch.setattr(transfer, "CHUNK_BYTES", 500)

    def slow(source, target):
        return Path(1e-5, 1e-7, 2e-5 if target == 2 else 1e-7)

    def train(comm):
        return counting(comm, log, late=0.02 * (comm.rank == 2), steps=60, quorum="majority", streams=streams)

    log = Log(3)
    outcomes = SimulatedWorld(3, slow).run(train)
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert log.sizes == {2, 3}
    assert log.began[2] - log.grew > 2


@pytest.mark.parametrize("streams", [False, True])
def test_the_dead_are_left_behind_and_come_back_as_others(streams):
    outcomes, log = check(4, [Dies(1, at=0.02)], {3: 0.06}, 2, steps=50, quorum="majority", streams=streams)
    assert outcomes[1] is None
    assert log.sizes >= {3}
    assert outcomes[0] == outcomes[3]


def test_who_leaves_has_given_all_its_steps():
    log = Log(3)
    SimulatedWorld(3).run(lambda comm: counting(comm, log, steps=30, leaves=9 if comm.rank == 1 else -1))
    total = sum(log.totals[0].values())
    assert torch.equal(total.view(2, 3)[0].round(), torch.tensor([float(steps) for steps in log.steps]).double())
    assert log.steps[1] < 20
    assert log.sizes == {3, 2}


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("bits", ["int2", "int8"])
def test_residuals_go_from_group_to_group(streams, bits):
    """Sums and residuals of all make up all steps, whoever has come meanwhile."""
    log = Log(3)
    world = SimulatedWorld(3)
    outcomes = world.run(
        lambda comm: counting(comm, log, late=0.02 * comm.rank, steps=30, streams=streams, width=50, compress=bits)
    )
    assert None not in outcomes
    assert len({str(held) for held in outcomes}) == 1
    assert outcomes[0][1] > 1
    left = sum(log.residuals)
    total = torch.cat([log.totals[0][fragment] for fragment in sorted(log.totals[0])])
    given = 30.0 * torch.arange(1, 51).repeat(6)
    torch.testing.assert_close(total + left, given, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("streams", [False, True])
def test_a_drained_state_of_three_goes_on_with_two(streams):
    def train(comm):
        model = torch.nn.ParameterDict({name: torch.zeros(3) for name in "ab"})
        if saved:
            model.load_state_dict(saved[0][0])
        kind, options = (StreamingDiLoCo, {"fragments": 2}) if streams else (DiLoCo, {})
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        world = Elastic(comm, at_least=comm.size)
        optimizer = kind(inner, model=model, sync_every=2, comm=world, allreduce=PartialAllreduce, **options)
        if saved:
            optimizer.load_state_dict(copy.deepcopy(saved[0][1]))
        for _ in range(5):
            comm.elapse(0.01)
            for p in model.parameters():
                p.grad = torch.full_like(p, 1.0 + comm.rank)
            optimizer.step()
            optimizer.average()
        with pytest.raises(ValueError, match="between two meetings"):
            optimizer.load_state_dict(optimizer.state_dict())
        optimizer.drain()
        if comm.rank == 0:
            saved.append((copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())))
        return [p.tolist() for p in model.parameters()], optimizer._driver._rounds.round

    saved = []
    first, second = SimulatedWorld(3).run(train), SimulatedWorld(2).run(train)
    assert first[0] == first[1] == first[2]
    assert second[0] == second[1]
    assert second[0][1] > first[0][1]


@pytest.mark.few(4)
@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("dead", [0, 1, 2])
@pytest.mark.parametrize("at", [0.05, 0.1])
def test_who_gives_a_newcomer_its_state_dies_amid(at, dead, streams, monkeypatch):
    """The newcomer leaves the rounds, so that the others do not wait for it, and comes again."""
    monkeypatch.setattr(transfer, "CHUNK_BYTES", 500)

    def slow(source, target):
        return Path(1e-5, 1e-7, 1e-5 if target == 3 else 1e-7)

    def train(comm):
        return counting(comm, log, late=0.02 * (comm.rank == 3), steps=60, quorum="majority", streams=streams)

    log = Log(4)
    outcomes = SimulatedWorld(4, slow, faults=[Dies(dead, at=at)]).run(train)
    living = [rank for rank in range(4) if rank != dead]
    assert len({str(outcomes[rank]) for rank in living}) == 1
    assert outcomes[3] is not None
    assert log.steps[3] == 60


def test_a_newcomer_of_another_model_goes_alone():
    def train(comm):
        comm.elapse(0.02 * (comm.rank == 2))
        w = torch.nn.Parameter(torch.zeros(4 + (comm.rank == 2)))
        world = Elastic(comm, start_with=2, patience=3.0)
        try:
            optimizer = DiLoCo(torch.optim.SGD([w], lr=0.1), sync_every=2, comm=world, allreduce=PartialAllreduce)
        except ValueError as error:
            return str(error)
        for _ in range(20):
            comm.elapse(0.01)
            w.grad = torch.ones_like(w)
            optimizer.step()
            optimizer.average()
        optimizer.finish()
        return w.tolist()

    first, second, other = SimulatedWorld(3).run(train)
    assert first == second
    assert "another model or other settings" in other


@pytest.mark.parametrize("eager", [False, True])
def test_states_of_unlike_rounds_are_refused(eager):
    def train(comm):
        p = torch.nn.Parameter(torch.zeros(2))
        inner, world = torch.optim.SGD([p], lr=0.1), Elastic(comm, at_least=2)
        if eager:
            optimizer = EagerSGD(inner, [("p", p)], comm=world)
        else:
            optimizer = DiLoCo(inner, sync_every=1, comm=world, allreduce=PartialAllreduce)
        meets = optimizer.synchronize if eager else optimizer.drain
        saved = []
        for _ in range(2):
            p.grad = torch.ones(2)
            comm.elapse(0.01)
            optimizer.step()
            if not eager:
                optimizer.average()
            meets()
            saved.append((p.detach().clone(), copy.deepcopy(optimizer.state_dict())))
        with torch.no_grad():
            p.copy_(saved[comm.rank][0])
        optimizer.load_state_dict(saved[comm.rank][1])

    with pytest.raises(CollectiveError, match="are to go on from rounds"):
        SimulatedWorld(2).run(train)


@pytest.mark.parametrize("late", [0.0, 0.02, 0.05])
def test_who_drains_meets_others_that_drain_not_those_that_are_called(late):
    """At one meeting all have drained as often."""

    def train(comm):
        comm.elapse(late * (comm.rank == 2))
        world = Elastic(comm, start_with=2)
        w = torch.nn.Parameter(torch.zeros(2))
        optimizer = DiLoCo(torch.optim.SGD([w], lr=0.1), sync_every=3, comm=world, allreduce=PartialAllreduce)
        for step in range(1, 21):
            comm.elapse(0.004 * (1 + comm.rank))
            w.grad = torch.ones_like(w)
            optimizer.step()
            optimizer.average()
            if step % 10 == 0 and comm.rank < 2:
                optimizer.drain()
                drained.append((optimizer._driver._elastic.number, step))
        optimizer.finish()
        return w.tolist()

    drained = []
    ends = SimulatedWorld(3).run(train)
    assert ends[0] == ends[1] == ends[2]
    if not late:
        assert len({step for number, step in drained}) == 2
    by_number = defaultdict(set)
    for number, step in drained:
        by_number[number].add(step)
    assert all(len(steps) == 1 for steps in by_number.values()), drained


def eager(model, comm):
    return EagerSGD(PLAIN(model.parameters()), model.named_parameters(), comm=comm)


def with_rounds(model, comm):
    rounds = partial(PartialAllreduce, quorum="majority")
    return DiLoCo(PLAIN(model.parameters()), sync_every=2, model=model, comm=comm, allreduce=rounds)


@pytest.mark.parametrize("made", [eager, with_rounds])
def test_a_founder_that_is_left_alone_has_a_state_before_another_rank_comes(made):
    """The two that begin do not reach each other. Who stays makes its optimizer, and waits for others only then."""

    def body(comm):
        comm.elapse(5.0 * (comm.rank == 2))
        model, world = torch.nn.Linear(4, 1), Elastic(comm, at_least=2, timeout=1.0)
        try:
            optimizer = made(model, world)
        except LeftOutError:
            return None
        for samples in world.deal(torch.ones(60, 4), batch_size=6):
            comm.elapse(0.01)
            optimizer.zero_grad()
            model(samples).square().mean().backward()
            optimizer.step()
            optimizer.synchronize() if made is eager else optimizer.average()
        optimizer.finish()
        return world.size, model.weight.detach()

    ranks = SimulatedWorld(3, faults=[LinkLost(0, 1, at=0.0, seconds=100)]).run(body)
    (size, weight), (other, same) = [rank for rank in ranks if rank is not None]
    assert size == other == 2
    assert torch.equal(weight, same)
