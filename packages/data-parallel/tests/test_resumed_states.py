"""A resumed training has the bits of one that never stopped, with algorithms that keep a state between calls."""

from dataclasses import dataclass

import pytest
import torch
from communicators import CollectiveError, SimulatedWorld
from data_parallel import DistributedOptimizer, reshard_residuals
from sparse_collectives import ALGORITHMS, ARCTopK, GTopK
from sparse_compress import RandomK, SparseVector
from torch import nn

pytestmark = pytest.mark.quick

OFTEN = {"thresholds_every": 2, "boundaries_every": 3}


@pytest.mark.parametrize("half", [1, 2, 3])
@pytest.mark.parametrize(
    "options", [{"algorithm": "oktopk", "options": OFTEN}, {"algorithm": ARCTopK()}], ids=["oktopk", "arc-topk"]
)
def test_a_resumed_run_has_the_same_bits_wherever_the_counters_stand(half, options, train):
    whole = SimulatedWorld(3).run(lambda c: train(c, range(6), **options))
    first = SimulatedWorld(3).run(lambda c: train(c, range(half), **options))
    rest = SimulatedWorld(3).run(lambda c: train(c, range(half, 6), saved=first[c.rank], **options))
    for (model, _), (other, _) in zip(whole, rest, strict=True):
        assert all(torch.equal(model[name], other[name]) for name in model)


@pytest.mark.parametrize("size", [3, 6])
def test_a_resumed_run_in_teams_has_the_same_bits(size, train):
    options = {"algorithm": "spardl", "options": {"teams": 3}, "bucket_bytes": 100}
    whole = SimulatedWorld(size).run(lambda c: train(c, range(6), **options))
    half = SimulatedWorld(size).run(lambda c: train(c, range(3), **options))
    assert all(s["step"] == 3 for _, s in half[0][1]["distributed"]["algorithm_state"])
    rest = SimulatedWorld(size).run(lambda c: train(c, range(3, 6), saved=half[c.rank], **options))
    for (model, _), (other, _) in zip(whole, rest, strict=True):
        assert all(torch.equal(model[name], other[name]) for name in model)


@pytest.mark.parametrize("name", [name for name, algorithm in ALGORITHMS.items() if algorithm.selects])
def test_a_resumed_run_on_a_wire_of_fewer_bytes_has_the_same_bits(name, train):
    options = {"algorithm": name, "wire": "bf16-packed", "bucket_bytes": 100}
    whole = SimulatedWorld(3).run(lambda c: train(c, range(6), **options))
    half = SimulatedWorld(3).run(lambda c: train(c, range(3), **options))
    rest = SimulatedWorld(3).run(lambda c: train(c, range(3, 6), saved=half[c.rank], **options))
    for (model, _), (other, _) in zip(whole, rest, strict=True):
        assert all(torch.equal(model[part], other[part]) for part in model)


class OwnDraws(RandomK):
    """Draws on each rank by itself, and saves where it is."""

    def __init__(self, rank):
        super().__init__(0.1)
        self.draw = torch.Generator().manual_seed(rank)

    def __call__(self, tensor, *, name=""):
        at = torch.randperm(len(tensor), generator=self.draw)[: self.entries(len(tensor))].sort().values
        return SparseVector(at.int(), tensor[at], len(tensor))

    def state_dict(self):
        return {"draw": self.draw.get_state()}

    def load_state_dict(self, state):
        self.draw.set_state(state["draw"])


@pytest.mark.parametrize("size", [2, 4])
def test_a_compressors_state_is_carried_to_the_ranks_that_inherit(size):
    def saved(comm):
        p = nn.Parameter(torch.zeros(40))
        inner, compressor = torch.optim.SGD([p], lr=0.1), OwnDraws(comm.rank)
        optimizer = DistributedOptimizer(
            inner, [("p", p)], comm=comm, compressor=compressor, algorithm="topk-allgather"
        )
        p.grad = torch.ones(40)
        optimizer.step()
        return optimizer.state_dict()

    before = SimulatedWorld(3).run(saved)
    drawn = [dict(state["distributed"]["compressor"])["draw"] for state in before]
    for rank, state in enumerate(reshard_residuals(before, size=size)):
        assert torch.equal(dict(state["distributed"]["compressor"])["draw"], drawn[rank % 3])


@dataclass(frozen=True)
class Counting(GTopK):
    """Counts its calls, but for one in which a rank forgets to."""

    name = "counting"

    def initial_state(self):
        return {"step": 0}

    def schedule(self, sparse, rank, size, k, state):
        reduction = yield from super().schedule(sparse, rank, size, k)
        state["step"] += rank == 0
        return reduction


def test_ranks_whose_states_have_counted_differently_are_told(train):
    with pytest.raises(CollectiveError, match=r"ranks disagree.*state=of 1 to 1 calls"):
        SimulatedWorld(2).run(lambda comm: train(comm, range(2), algorithm=Counting()))
