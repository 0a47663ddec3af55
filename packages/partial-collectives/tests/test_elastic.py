"""Eager ranks that die and come: rounds go on, newcomers come in at meetings, nothing of the living is lost."""

from __future__ import annotations

import copy
import random
from collections import defaultdict

import pytest
import torch
from communicators import CollectiveError, Dies, Elastic, SimulatedWorld
from partial_collectives import EagerSGD

pytestmark = pytest.mark.quick


class Counting(EagerSGD):
    """Parameter r counts the gradients of rank r of the world that were applied."""

    def _put(self, result):
        for p, total in zip(self._trained, result.total, strict=True):
            p.grad = total.neg()


class Log:
    """Events of one world that outlive its ranks: gradients given by rank, and what each rank held at each meeting."""

    def __init__(self, size):
        self.given = [0] * size
        self.met = defaultdict(list)
        self.sizes = set()
        self.over = False


def counting(comm, log, *, late=0.0, epochs=3, seed=0, **rounds):
    """Trains so many epochs of a drawn number of steps, which take drawn times. None: not let in, or after the end."""
    draw = random.Random(f"{seed}/{comm.rank}")
    comm.elapse(late)
    world = Elastic(comm, timeout=0.5, patience=3.0)
    w = torch.nn.Parameter(torch.zeros(comm.size, dtype=torch.float64))
    try:
        if not world.newcomer and log.over:
            return None
        optimizer = Counting(torch.optim.SGD([w], lr=1.0), [("w", w)], comm=world, **rounds)
    except TimeoutError:
        return None
    with optimizer:
        for _ in range(epochs):
            for _ in range(draw.randint(0, 4)):
                comm.elapse(draw.choice([0.0, 1e-3, 5e-3, 2e-2]))
                w.grad = torch.nn.functional.one_hot(torch.tensor(comm.rank), comm.size).double()
                log.given[comm.rank] += 1
                optimizer.step()
            optimizer.synchronize()
            log.met[optimizer._elastic.number].append((w.tolist(), optimizer.applied, optimizer.gradients))
            log.sizes.add(world.size)
    log.over = True
    return w.tolist(), optimizer.applied, optimizer.gradients, world.generation


def runs(size, faults, late, seed, *, jitter=2e-4, **options):
    """Runs a world, and looks at its laws; returns the outcomes and the log."""
    log = Log(size)
    world = SimulatedWorld(size, seed=seed, jitter=jitter, faults=faults)
    outcomes = world.run(lambda comm: counting(comm, log, late=late.get(comm.rank, 0.0), seed=seed, **options))
    replay = f"{size=}, {faults=}, {late=}, {seed=}, {jitter=}, {options=}"
    for held in log.met.values():
        assert all(one == held[0] for one in held), replay
    left = {rank: outcome for rank, outcome in enumerate(outcomes) if outcome is not None}
    if left:
        counts, applied, gradients, generation = next(iter(left.values()))
        assert set(map(str, left.values())) == {str((counts, applied, gradients, generation))}, replay
        assert sum(counts) == gradients, replay
        for rank, number in enumerate(log.given):
            assert counts[rank] == number if rank in left else counts[rank] <= number, replay
    return outcomes, log


def drawn(size, seed):
    """Deaths and late ranks of a seed; deaths between two messages, or at any time."""
    draw = random.Random(f"plan {seed}")
    late = {rank: draw.uniform(0, 0.15) for rank in range(1, size) if draw.random() < 0.4}
    faults = []
    for rank in draw.sample(range(size), draw.randint(0, size - 1)):
        at = draw.random() < 0.5
        faults.append(Dies(rank, at=draw.uniform(1e-3, 0.25)) if at else Dies(rank, message=draw.randint(1, 150)))
    options = {
        "quorum": draw.choice(["solo", "majority", 2, size]),
        "max_staleness": draw.randint(0, 3),
        "grace": draw.choice([0.0, 1e-3]),
    }
    return faults, late, {**options, "jitter": draw.choice([0.0, 2e-4, 5e-3])}


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("size", [2, 3, 5, 8])
@pytest.mark.parametrize("part", range(5))
def test_ranks_come_and_die_and_those_that_live_agree_and_lose_nothing(size, part):
    for seed in range(5 * part, 5 * part + 5):
        faults, late, options = drawn(size, seed)
        runs(size, faults, late, seed, **options)


@pytest.mark.slow
@pytest.mark.few(6)
@pytest.mark.parametrize("message", range(1, 40, 2))
def test_joiner_or_donor_dies(message):
    """Rank 2 comes late and dies with each of its first messages; or one of those who would give it the state does."""
    for dying in (1, 2):
        _, log = runs(3, [Dies(dying, message=message)], {2: 0.02}, message, quorum="majority")
        assert log.met


def test_of_one_rank_all_others_come_and_go():
    outcomes, log = runs(3, [], {1: 0.01, 2: 0.03}, 1, epochs=5, quorum=3)
    assert None not in outcomes
    assert max(log.sizes) == 3


def test_what_an_elastic_does_not_take_is_refused():
    def body(comm):
        w = torch.nn.Parameter(torch.zeros(1))
        world, sgd = Elastic(comm), torch.optim.SGD([w], lr=1.0)
        with pytest.raises(ValueError, match="on_death='error' ends all ranks"):
            EagerSGD(sgd, [("w", w)], comm=world, on_death="error")
        with pytest.raises(ValueError, match="buffers='average' takes all ranks"):
            EagerSGD(sgd, [("w", w)], comm=world, model=torch.nn.BatchNorm1d(1), buffers="average")

    SimulatedWorld(1).run(body)


def test_state_of_three_ranks_goes_on_with_two():
    def train(comm):
        w = torch.nn.Parameter(torch.zeros(2))
        with EagerSGD(
            torch.optim.SGD([w], lr=1.0, momentum=0.5), [("w", w)], comm=Elastic(comm, at_least=comm.size)
        ) as o:
            if saved:
                with torch.no_grad():
                    w.copy_(saved[0][0])
                o.load_state_dict(copy.deepcopy(saved[0][1]))
            for _ in range(2):
                comm.elapse(0.01)
                w.grad = torch.ones(2)
                o.step()
            o.synchronize()
            if comm.rank == 0:
                saved.append((w.detach().clone(), o.state_dict()))
        return w.tolist(), o.applied, o.gradients

    saved = []
    first = SimulatedWorld(3).run(train)
    second = SimulatedWorld(2).run(train)
    assert first[0] == first[1] == first[2]
    assert second[0] == second[1]
    assert second[0][2] == first[0][2] + 4


def test_statistics_go_on_in_the_next_group():
    def body(comm):
        world, found = Elastic(comm, timeout=0.5, start_with=3), []
        w = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
        with EagerSGD(torch.optim.SGD([w], lr=1.0), [("w", w)], comm=world) as optimizer:
            for step in range(6):
                comm.elapse(0.1)
                w.grad = torch.ones(3, dtype=torch.float64)
                optimizer.step()
                found.append(optimizer.stats())
                if step % 2:
                    optimizer.synchronize()
        return found

    histories = SimulatedWorld(3, faults=[Dies(1, at=0.35)]).run(body)
    assert histories[1] is None
    for history in (histories[0], histories[2]):
        assert {(stats["ranks"], stats["generation"]) for stats in history} == {(3, 1), (2, 2)}
        for name in ("steps", "rounds", "gradients", "bytes_sent", "seconds_exchanging", "seconds_waited"):
            values = [stats[name] for stats in history]
            assert values == sorted(values), name
        changed = next(i for i, stats in enumerate(history) if stats["ranks"] == 2)
        assert history[changed]["seconds_exchanging"] > history[changed - 1]["seconds_exchanging"] > 0


def test_replicas_that_have_come_apart_are_told_where_all_meet():
    def body(comm):
        w = torch.nn.Parameter(torch.zeros(3))
        world = Elastic(comm, start_with=3)
        with EagerSGD(torch.optim.SGD([w], lr=1.0), [("w", w)], comm=world, quorum=3, verify=1) as optimizer:
            for step in range(2):
                w.grad = torch.ones(3)
                optimizer.step()
                if step == 1 and comm.rank == 1:
                    w.detach()[0] += 1
                optimizer.synchronize()

    with pytest.raises(CollectiveError, match="replicas differ after 2 rounds: rank 1 in 'w', against most of the 3"):
        SimulatedWorld(3).run(body)


def halving(comm):
    """Halves the rate by hand at every meeting; rank 2 comes later, and gets the rate as the others have set it."""
    comm.elapse(0.02 * (comm.rank == 2))
    world = Elastic(comm, timeout=0.5, patience=3.0)
    w = torch.nn.Parameter(torch.zeros(2))
    with EagerSGD(torch.optim.SGD([w], lr=1.0), [("w", w)], comm=world, quorum="solo") as optimizer:
        for _ in range(8):
            for _ in range(2):
                comm.elapse(5e-3 * (1 + comm.rank))
                w.grad = torch.ones(2) * (1 + comm.rank)
                optimizer.step()
            optimizer.synchronize()
            optimizer.param_groups[0]["lr"] = max(optimizer.param_groups[0]["lr"] / 2, 1 / 16)
    return w.tolist(), optimizer.param_groups[0]["lr"], world.generation


def test_a_newcomer_gets_a_rate_that_was_set_where_the_others_have_met():
    (held, rate, generation), *others = SimulatedWorld(3).run(halving)
    assert rate == 1 / 16
    assert generation > 1
    assert others == [(held, rate, generation)] * 2
