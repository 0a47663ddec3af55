"""A collective that cannot proceed fails on every rank with the same reason."""

import pytest
import torch
from communicators import CollectiveError, Corrupts, Dies, SimulatedWorld
from sparse_collectives import ALGORITHMS, sparse_allreduce
from sparse_compress import topk

pytestmark = pytest.mark.quick


def reasons(world, body):
    """What every rank's call raised."""

    def caught(comm):
        with pytest.raises(CollectiveError) as error:
            body(comm)
        return str(error.value)

    return world.run(caught)


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(
    ("odd", "says"),
    [
        ({"k": 3}, "k=3"),
        ({"x": torch.ones(11)}, "numel=11"),
        ({"x": torch.ones(10, dtype=torch.float64)}, "torch.float64"),
        ({"algorithm": "other"}, "gtopk"),
    ],
)
def test_ranks_that_disagree(name, size, odd, says):
    other = "topk-allgather" if name == "gtopk" else "gtopk"

    def body(comm):
        call = {"x": torch.ones(10), "k": 2, "algorithm": name}
        if comm.rank == size - 1:
            call |= {key: other if value == "other" else value for key, value in odd.items()}
        return sparse_allreduce(topk(call["x"], 2), comm, k=call["k"], algorithm=call["algorithm"])

    told = reasons(SimulatedWorld(size), body)
    assert len(set(told)) == 1
    assert f"rank {size - 1} calls" in told[0]
    assert says in told[0]


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_corrupted_message(name, size):
    def body(comm):
        for _ in range(2):  # a rank that had already got everything learns it at its next call
            sparse_allreduce(topk(torch.ones(10), 2), comm, k=2, algorithm=name)

    told = reasons(SimulatedWorld(size, faults=[Corrupts(rank=1)]), body)
    assert len(set(told)) == 1
    assert "corrupted message" in told[0]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_rank_that_dies(name):
    def body(comm):
        with pytest.raises(CollectiveError) as error:
            sparse_allreduce(topk(torch.ones(10), 2), comm, k=2, algorithm=name)
        return str(error.value)

    told = SimulatedWorld(3, faults=[Dies(rank=1)]).run(body)
    assert told[1] is None
    assert told[0] == told[2]
    assert "rank 1 died" in told[0]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_rank_whose_arguments_are_wrong(name):
    told = {}

    def body(comm):
        try:
            sparse_allreduce(topk(torch.ones(10), 2), comm, k=0 if comm.rank == 2 else 2, algorithm=name)
        except CollectiveError as error:
            told[comm.rank] = str(error)

    with pytest.raises(ValueError, match="k is 0"):
        SimulatedWorld(3).run(body)
    assert set(told) == {0, 1}
    assert told[0] == told[1]
    assert "rank 2 failed in its own code: ValueError: k is 0" in told[0]
