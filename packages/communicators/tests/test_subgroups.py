"""Groups of ranks in a simulated world: their own numbering, calls side by side, errors of their own."""

import pytest
import torch
from communicators import CollectiveError, Round, SimulatedWorld, allgather, allreduce, allreduce_async, run
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.quick


@given(st.lists(st.integers(-2, 3), min_size=1, max_size=9), st.integers(0, 5))
def test_sums_over_those_of_the_same_color(colors, seed):
    def body(comm):
        group = comm.split(colors[comm.rank])
        for _ in range(abs(colors[comm.rank])):  # groups make other numbers of calls
            allreduce(torch.ones(3), group)
        twin = group.duplicate()
        work = allreduce_async(torch.tensor([1.0]), twin)
        ranks = torch.cat(allgather(torch.tensor([comm.rank]), group)).tolist()
        total = allreduce(torch.tensor([comm.rank]), comm)
        return group.rank, group.size, ranks, int(work.wait()), int(total)

    world = SimulatedWorld(len(colors), seed=seed)
    for rank, (own, size, ranks, ones, total) in enumerate(world.run(body)):
        assert ranks == [other for other, color in enumerate(colors) if color == colors[rank]]
        assert (ranks[own], size, ones) == (rank, len(ranks), len(ranks))
        assert total == sum(range(len(colors)))


def test_rows_and_columns_at_once():
    def body(comm):
        row, column = comm.split(comm.rank // 3), comm.split(comm.rank % 3)
        one, other = (allreduce_async(torch.tensor([comm.rank]), group) for group in (row, column))
        return int(other.wait()), int(one.wait())

    expected = [(rank % 3 * 2 + 3, 3 * (rank // 3 * 3) + 3) for rank in range(6)]
    assert SimulatedWorld(6).run(body) == expected


def test_a_mismatch_in_one_group_is_none_in_another():
    def body(comm):
        group = comm.split(comm.rank // 2)
        numel = 5 if comm.rank == 1 else 4
        if comm.rank < 2:
            with pytest.raises(CollectiveError, match=r"shape=\(5,\)"):
                allreduce(torch.ones(numel), group, native=False)
        return float(allreduce(torch.ones(1), comm))

    assert SimulatedWorld(4).run(body) == [4.0] * 4


def test_peers_outside_the_group():
    def schedule():
        yield Round(recvs={2: 100})

    def body(comm):
        run(schedule(), comm.split(comm.rank // 2))

    with pytest.raises(CollectiveError, match=r"a group of 2 ranks has no ranks \[2\]"):
        SimulatedWorld(4).run(body)


def test_signals_stay_in_their_group():
    """At each level ranks count from 0."""

    def body(comm):
        half = comm.split(comm.rank // 3)
        pair = half.split(half.rank % 2)
        of_half, of_pair = half.signals(), pair.signals()
        of_half.send_all(10 + comm.rank)
        of_pair.send_all(20 + comm.rank)
        of_half.close()
        of_pair.close()
        return sorted(of_half.poll()), sorted(of_pair.poll())

    first, second, third, *others = SimulatedWorld(6).run(body)
    assert first == ([(1, 11), (2, 12)], [(1, 22)])
    assert second == ([(0, 10), (2, 12)], [])
    assert third == ([(0, 10), (1, 11)], [(0, 20)])
    assert others[0] == ([(1, 14), (2, 15)], [(1, 25)])
