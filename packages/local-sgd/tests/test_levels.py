"""Two levels: plain means in small groups, the algorithm among all ranks."""

from functools import partial

import numpy as np
import pytest
import torch
from communicators import CollectiveError, SimulatedWorld
from hypothesis import given
from hypothesis import strategies as st
from local_sgd import BMUF, DiLoCo, LocalSGD
from torch import nn

pytestmark = pytest.mark.quick

N, STEPS = 5, 26
WORLDS = st.sampled_from([(4, 2), (6, 3), (6, 2), (4, 1), (4, 4)])
"""Ranks, and of them a machine."""


def noise(seed, rank):
    return np.random.default_rng([seed, rank]).normal(size=(STEPS, N)) + rank


def reference(m, machine, often, times, η, β, seed):
    """x of all ranks after every step; η, β of DiLoCo, or None."""
    shifts = np.array([noise(seed, rank) for rank in range(m)])
    x, z, v, history = np.zeros((m, N)), np.zeros(N), np.zeros(N), []
    for step in range(1, STEPS + 1):
        x = x - 0.3 * (x - shifts[:, step - 1])
        if step % often == 0:
            x = np.repeat(x.reshape(-1, machine, N).mean(1), machine, axis=0)
        if step % (often * times) == 0:
            if η is None:
                z = x.mean(0)
            else:
                delta = z - x.mean(0)
                v = β * v + delta
                z = z - η * (delta + β * v)
            x = np.tile(z, (m, 1))
        history.append(x.copy())
    return np.array(history).transpose(1, 0, 2)


SGD = partial(torch.optim.SGD, lr=0.3)


def begin(algorithm, comm, machine, sync_every, *, inner=SGD, **options):
    p = nn.Parameter(torch.zeros(N, dtype=torch.float64))
    group = comm.split(comm.rank // machine)
    pairs = [(group, sync_every[0]), (comm, sync_every[1])]
    return p, algorithm(inner([p]), sync_every=pairs, **options)


def go(p, optimizer, shifts, *, weight=None):
    history = []
    for shift in shifts:
        p.grad = p.detach() - torch.from_numpy(shift)
        optimizer.step()
        optimizer.average(weight)
        history.append(p.detach().numpy().copy())
    return np.array(history)


@pytest.mark.slow
@given(WORLDS, st.integers(1, 4), st.integers(1, 4), st.floats(0.1, 0.9), st.floats(0.0, 0.9), st.integers(0, 99))
def test_recurrence(world, often, times, η, β, seed):
    m, machine = world

    def body(comm, algorithm, **options):
        p, optimizer = begin(algorithm, comm, machine, (often, often * times), **options)
        history = go(p, optimizer, noise(seed, comm.rank))
        optimizer.finish()
        return history, p.detach().numpy().copy()

    outer = partial(torch.optim.SGD, lr=η, momentum=β, nesterov=β > 0)
    for algorithm, options, rule in [(LocalSGD, {}, (None, None)), (DiLoCo, {"outer": outer}, (η, β))]:
        found, ends = zip(*SimulatedWorld(m).run(partial(body, algorithm=algorithm, **options)), strict=True)
        expected = reference(m, machine, often, times, *rule, seed)
        np.testing.assert_allclose(np.array(found), expected, rtol=1e-12, atol=1e-12 * np.abs(expected).max())
        assert all(np.array_equal(end, ends[0]) for end in ends)


@pytest.mark.slow
@given(
    st.lists(st.integers(0, 9), min_size=4, max_size=4),
    st.integers(1, 3),
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from([None, "int8"]),
)
def test_ranks_end_as_they_like_and_go_on(steps, often, times, weighted, compress):
    """Every rank with its own number of steps: no hang, and all hold the model; then once more."""

    def body(comm):
        options = {"weighted": weighted, "compress": compress}
        p, optimizer = begin(LocalSGD, comm, 2, (often, often * times), **options)
        ends, weight = [], comm.rank + 1 if weighted else None
        for _ in range(2):
            go(p, optimizer, noise(0, comm.rank)[: steps[comm.rank]], weight=weight)
            optimizer.finish()
            ends.append(p.detach().clone())
        return ends

    for ends in zip(*SimulatedWorld(4).run(body), strict=True):
        assert all(torch.equal(end, ends[0]) for end in ends)


@pytest.mark.slow
@pytest.mark.few(4)
@pytest.mark.parametrize("algorithm", [LocalSGD, DiLoCo, partial(LocalSGD, compress="int8")])
@pytest.mark.parametrize("at", [1, 2, 3, 4, 6, 9])
def test_resumed_runs_have_the_same_bits(saved, algorithm, at):
    def body(comm, stop):
        start = partial(begin, algorithm, comm, 2, (2, 6), inner=partial(torch.optim.Adam, lr=0.1))
        p, optimizer = start()
        shifts = noise(1, comm.rank)
        if stop:
            go(p, optimizer, shifts[:stop])
            state, x = saved(optimizer.state_dict()), p.detach().clone()
            p, optimizer = start()
            p.data.copy_(x)
            optimizer.load_state_dict(state)
        go(p, optimizer, shifts[stop:13])
        x = p.detach().clone()
        optimizer.finish()
        return torch.stack([x, p.detach()])

    straight, resumed = (SimulatedWorld(4).run(partial(body, stop=stop)) for stop in (0, at))
    for one, other in zip(straight, resumed, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("colors", [(0, 0, 0, 1), (0, 1, 0, 1), (2, 0, 0, 5)])
def test_groups_of_any_shape_and_order(colors):
    def body(comm):
        p = nn.Parameter(torch.zeros(1))
        pairs = [(comm.split(colors[comm.rank]), 1), (comm, 3)]
        optimizer = LocalSGD(torch.optim.SGD([p], lr=1.0), sync_every=pairs)
        places = []
        for _ in range(3):
            p.grad = torch.full_like(p, -comm.rank)
            optimizer.step()
            optimizer.average()
            places.append(p.item())
        optimizer.drain()
        return places

    ranks = range(4)
    for rank, (first, second, third) in enumerate(SimulatedWorld(4).run(body)):
        mates = [other for other in ranks if colors[other] == colors[rank]]
        mean = sum(mates) / len(mates)
        assert (first, second, third) == pytest.approx((mean, 2 * mean, 4.5))


def test_bytes_within_and_among():
    """Off the seldom boundary nothing leaves the machine."""

    def body(comm):
        p, optimizer = begin(LocalSGD, comm, 1, (1, 4))
        before = comm.bytes_sent
        go(p, optimizer, noise(0, comm.rank)[:3])
        inside = comm.bytes_sent - before
        go(p, optimizer, noise(0, comm.rank)[3:4])
        return inside, comm.bytes_sent - before

    for inside, all_of_it in SimulatedWorld(2).run(body):
        assert inside == 0 < all_of_it


def test_a_rank_that_goes_on_while_another_drains():
    def body(comm):
        p, optimizer = begin(LocalSGD, comm, 2, (1, 4))
        go(p, optimizer, noise(0, comm.rank)[:2])
        if comm.rank == 0:
            optimizer.drain()
        go(p, optimizer, noise(0, comm.rank)[2:9])

    with pytest.raises(RuntimeError, match=r"drain\(\) is for all ranks at the same point, but 1 of 2 went on"):
        SimulatedWorld(2).run(body)


def test_nan_is_named():
    def body(comm):
        p, optimizer = begin(LocalSGD, comm, 2, (1, 4))
        if comm.rank == 3:
            p.data[0] = float("nan")
        optimizer.average()

    with pytest.raises(CollectiveError, match=r"in its group: the average is not finite in .* ranks \[1\]"):
        SimulatedWorld(4).run(body)


def test_bad_input(saved):
    def body(comm):
        sgd = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
        pair, alone = comm.split(comm.rank // 2), comm.split(comm.rank)
        with pytest.raises(ValueError, match="has 2 and 3 steps, expected a multiple of 2 as the last one"):
            LocalSGD(sgd, sync_every=[(pair, 2), (comm, 3)])
        with pytest.raises(ValueError, match="expected a number or two pairs of a group and a number"):
            LocalSGD(sgd, sync_every=[(pair, 2)])
        with pytest.raises(ValueError, match="comm is given, and a group of all ranks in the last pair"):
            LocalSGD(sgd, sync_every=[(pair, 2), (comm, 4)], comm=comm)
        with pytest.raises(TypeError, match=r"the first number of sync_every is 1\.5"):
            DiLoCo(sgd, sync_every=[(pair, 1.5), (comm, 4)])
        with pytest.raises(ValueError, match="the first pair of sync_every has no group"):
            DiLoCo(sgd, sync_every=[(None, 1), (comm, 4)])
        with pytest.raises(TypeError, match="sync_every"):
            BMUF(sgd, comm=comm, sync_every=[(pair, 1), (comm, 4)])
        column = comm.split(comm.rank % 2)  # one rank of each machine
        with pytest.raises(
            ValueError, match=r"do not fit: those of ranks .* are not within the last group, of 2 ranks"
        ):
            LocalSGD(sgd, sync_every=[(pair, 1), (column, 4)])
        with pytest.raises(ValueError, match="do not fit"):
            LocalSGD(sgd, sync_every=[(comm, 1), (alone, 4)])
        two, one = LocalSGD(sgd, sync_every=[(pair, 2), (comm, 4)]), LocalSGD(sgd, comm=comm)
        with pytest.raises(ValueError, match="the state is of 2 levels, sync_every of 1"):
            one.load_state_dict(saved(two.state_dict()))
        with pytest.raises(ValueError, match="sync_every of two levels stays as it is"):
            two.sync_every = 8

    SimulatedWorld(4).run(body)
