"""Where all of a gradient is sent, as at first in a warm-up, it is summed as "dense" sums it, or "dense-int8"."""

import pytest
import torch
from communicators import CollectiveError, SimulatedWorld
from data_parallel import DistributedOptimizer
from sparse_collectives import ALGORITHMS
from sparse_compress import DGCTopK, WarmUp
from torch import nn

NUMEL = 240


def steps(size, number, inner=0.0, **options):
    """Of each rank: what was sent in each step, the parameters, and the residuals."""

    def rank(comm):
        model = nn.ParameterDict({"a": nn.Parameter(torch.zeros(40, 5)), "b": nn.Parameter(torch.zeros(40))})
        sgd = torch.optim.SGD(model.parameters(), lr=1.0, momentum=inner)
        optimizer = DistributedOptimizer(sgd, model.named_parameters(), comm=comm, **options)
        sent = []
        for step in range(number):
            generator = torch.Generator().manual_seed(7 * step + comm.rank)
            for p in model.values():
                p.grad = torch.randint(-9, 10, p.shape, generator=generator) * float(size)
            before = comm.bytes_sent
            optimizer.step()
            sent.append(comm.bytes_sent - before)
        waits = optimizer.state_dict()["distributed"]["residuals"]
        return (
            sent,
            torch.cat([p.detach().view(-1) for p in model.values()]),
            sum(float(r.abs().sum()) for r in waits.values()),
        )

    return SimulatedWorld(size).run(rank)


@pytest.mark.few(8)
@pytest.mark.parametrize("wire", ["fp32", "int8-packed"])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("algorithm", [name for name, entry in ALGORITHMS.items() if entry.selects])
def test_all_is_summed_as_dense_sums_it(algorithm, size, wire):
    density, whole_one = WarmUp(0.05, steps=2, stages=(1.0,)), {"fp32": "dense", "int8-packed": "dense-int8"}[wire]
    sparse = steps(size, 3, algorithm=algorithm, density=density, wire=wire)
    dense = steps(size, 2, algorithm=whole_one)
    for (sent, _, _), (expected, _, _) in zip(sparse, dense, strict=True):
        assert sent[:2] == expected
        assert size == 1 or wire != "fp32" or sent[2] < expected[0]
    whole = steps(size, 2, algorithm=algorithm, density=1.0, wire=wire)
    for (_, values, waits), (_, expected, waits_too) in zip(whole, dense, strict=True):
        assert torch.equal(values, expected)
        assert waits == pytest.approx(waits_too)
        assert waits == 0 or wire != "fp32"  # whole numbers: no rounding


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("algorithm", ["gtopk", "oktopk", "spardl"])
def test_momentum_before_the_selection_is_sgds_own_where_all_is_sent(algorithm, size):
    """Masked, it was no momentum at all in a dense warm-up."""
    before, after = (
        steps(size, 4, algorithm=name, density=1.0, **given)
        for name, given in ((algorithm, {"momentum": 0.5}), ("dense", {"inner": 0.5}))
    )
    for (_, ours, waits), (_, theirs, _) in zip(before, after, strict=True):
        assert torch.equal(ours, theirs)
        assert waits == 0


def test_ranks_of_which_one_estimates_are_told():
    def rank(comm):
        parameter = nn.Parameter(torch.zeros(30))
        own = {"density": 1.0} if comm.rank else {"compressor": DGCTopK(1.0)}
        optimizer = DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), [("p", parameter)], comm=comm, **own)
        parameter.grad = torch.ones(30)
        with pytest.raises(CollectiveError):
            optimizer.step()
        return True

    assert SimulatedWorld(2).run(rank) == [True, True]
