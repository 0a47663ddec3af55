"""Ranks of a simulated world that send and receive at rates of their own."""

import pytest
import torch
from communicators import Link, Path, Payload, Round, SimulatedWorld, allreduce, run
from hypothesis import given
from hypothesis import strategies as st

NBYTES = 1000


def one_to_many(rank, size, sender):
    """`sender` sends NBYTES to all others at once."""
    payload = Payload.of(torch.zeros(NBYTES, dtype=torch.uint8))
    others = [peer for peer in range(size) if peer != sender]
    if rank == sender:
        yield Round(sends=dict.fromkeys(others, payload))
    else:
        yield Round(recvs={sender: NBYTES})


def many_to_one(rank, size, receiver):
    payload = Payload.of(torch.zeros(NBYTES, dtype=torch.uint8))
    if rank == receiver:
        yield Round(recvs={peer: NBYTES for peer in range(size) if peer != receiver})
    else:
        yield Round(sends={receiver: payload})


def elapsed(size, paths, schedule):
    world = SimulatedWorld(size, paths)
    world.run(lambda comm: run(schedule(comm.rank, comm.size, 0), comm, facts=""))
    return world.elapsed


def rates(up, down, alpha=0.0):
    """Paths of ranks with these seconds per byte."""
    return lambda source, target: Path(alpha, up[source], down[target])


WIRE = Payload.of(torch.zeros(NBYTES, dtype=torch.uint8)).wire_nbytes


def test_a_slow_receiver_does_not_keep_a_fast_sender_from_the_others():
    """Rank 1 takes ten times as long to receive: the others get theirs meanwhile."""
    up, down = [1e-6] * 4, [1e-6, 1e-5, 1e-6, 1e-6]
    assert elapsed(4, rates(up, down), one_to_many) == pytest.approx(1e-5 * WIRE)
    slowed = elapsed(4, Link(0.0, 1e-5), one_to_many)
    assert slowed == pytest.approx(3e-5 * WIRE)


def test_a_fast_receiver_hears_slow_senders_side_by_side():
    up, down = [1e-6, 1e-5, 1e-5, 1e-5], [1e-7] * 4
    assert elapsed(4, rates(up, down), many_to_one) == pytest.approx(1e-5 * WIRE, rel=0.03)


def test_what_a_rank_receives_comes_no_faster_than_its_own_rate():
    up, down = [1e-6, 1e-7, 1e-7, 1e-7], [1e-6] * 4
    assert elapsed(4, rates(up, down), many_to_one) == pytest.approx(3e-6 * WIRE)


@given(
    st.integers(1, 8),
    st.floats(0, 1e-3, allow_subnormal=False),
    st.floats(0, 1e-6, allow_subnormal=False),
    st.integers(0, 500),
)
def test_equal_paths_are_the_link(size, alpha, beta, numel):
    """The same seconds and bits as of a `Link`."""

    def found(link):
        world = SimulatedWorld(size, link)
        totals = world.run(lambda comm: allreduce(torch.full((numel,), 1.0 + comm.rank), comm, native=False))
        return world.elapsed, [total.tolist() for total in totals]

    assert found(lambda source, target: Path(alpha, beta, beta)) == found(Link(alpha, beta))


@given(st.data(), st.integers(2, 6), st.integers(1, 300))
def test_unequal_paths_change_the_seconds_alone(data, size, numel):
    """Sums have the same bits, and nobody sends faster than at his own rate."""
    drawn = st.lists(st.floats(1e-9, 1e-6), min_size=size, max_size=size)
    up, down = data.draw(drawn), data.draw(drawn)

    def found(link):
        world = SimulatedWorld(size, link)
        totals = world.run(lambda comm: allreduce(torch.full((numel,), 1.0 + comm.rank), comm, native=False))
        return world, [total.tolist() for total in totals]

    unequal, sums = found(rates(up, down, 1e-5))
    assert sums == found(Link())[1]
    assert unequal.elapsed >= max(sent * seconds for sent, seconds in zip(unequal.bytes_sent, up, strict=True)) * 0.999


@pytest.mark.parametrize("wrong", [-1e-9, float("nan"), float("inf")])
def test_a_cost_that_is_none_is_refused(wrong):
    with pytest.raises(ValueError, match="alpha, up and down >= 0"):
        Path(0.0, wrong, 0.0)
