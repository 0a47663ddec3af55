"""Sparse collectives on real ranks, by MPI and by gloo: the laws, the simulated world's bits, one reason on all ranks.

Started as a program on every rank (`mpi|gloo REPORT.json`) it runs all cases; rank 0 writes what came of each.
"""

from __future__ import annotations

import json
import sys
import traceback

import pytest
import torch
from communicators import CollectiveError, SimulatedWorld, as_communicator, testing
from sparse_collectives import ALGORITHMS, DistributedOptimizer, sparse_allreduce, sparse_allreduce_async
from sparse_compress import SparseVector, TopK, topk
from torch import nn

WORLDS = [pytest.param(("mpi", size), marks=pytest.mark.mpi, id=f"mpi-{size}") for size in (1, 2, 3, 4)] + [
    pytest.param(("gloo", size), id=f"gloo-{size}") for size in (2, 3)
]


SHAPES = [  # elements, entries given, k, dtype
    (1, 1, 1, torch.float32),
    (7, 7, 2, torch.float64),
    (1000, 10, 20, torch.float32),
    (4096, 4096, 4096, torch.float32),
]


def vectors(size, numel, entries, dtype=torch.float32):
    """The same on every rank, one for each, with ties."""
    generator = torch.Generator().manual_seed(numel)
    return [topk(torch.randint(-9, 10, (numel,), generator=generator).to(dtype), entries) for _ in range(size)]


def laws(comm):
    for name, entry in ALGORITHMS.items():
        for numel, entries, k, dtype in SHAPES:

            def traffic(rank, size, entry=entry, k=k, numel=numel, dtype=dtype):
                sent = entry.sent(rank, size, k, numel, dtype)
                return testing.Traffic(sent.nbytes, sent.messages)

            testing.check_laws(
                lambda c, sparse, name=name, k=k: sparse_allreduce(sparse, c, k=k, algorithm=name),
                vectors(comm.size, numel, entries, dtype),
                dense=SparseVector.to_dense,
                total=lambda reduction: reduction.total.to_dense(),
                dropped=lambda reduction: reduction.dropped.to_dense(),
                traffic=traffic,
                comm=comm,
            )


def floats_have_the_bits_of_the_simulated_world(comm):
    inputs = [torch.randn(500, generator=torch.Generator().manual_seed(rank)) for rank in range(comm.size)]
    for name in ALGORITHMS:

        def call(c, name=name):
            works = [sparse_allreduce_async(topk(inputs[c.rank] * i, 50), c, k=50, algorithm=name) for i in (1, 2, 3)]
            return [work.wait() for work in reversed(works)]

        for real, simulated in zip(call(comm), SimulatedWorld(comm.size).run(call)[comm.rank], strict=True):
            assert torch.equal(real.total.to_dense(), simulated.total.to_dense())
            assert torch.equal(real.dropped.to_dense(), simulated.dropped.to_dense())


def train(comm, name):
    """A few steps with integer gradients, so that a native dense sum has the same bits too."""
    model = nn.ParameterDict({key: nn.Parameter(torch.full((5, 3), float(comm.rank))) for key in "abc"})
    optimizer = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.5),
        model.named_parameters(),
        comm=comm,
        algorithm=name,
        compressor=TopK(0.1),
        bucket_bytes=100,
    )
    for step in range(5):
        generator = torch.Generator().manual_seed(10 * step + comm.rank)
        for p in model.values():
            p.grad = torch.randint(-9, 10, p.shape, generator=generator).float()
        optimizer.step()
    own = optimizer.state_dict()["distributed"]["residuals"]
    return torch.cat([tensor.detach().view(-1) for tensor in (*model.values(), *own.values())])


def training_has_the_bits_of_the_simulated_world(comm):
    for name in ALGORITHMS:
        simulated = SimulatedWorld(comm.size).run(lambda c, name=name: train(c, name))
        assert torch.equal(train(comm, name), simulated[comm.rank])


def other_k(comm):
    sparse_allreduce(topk(torch.ones(100), 5), comm, k=5 + (comm.rank == comm.size - 1))


def nan_gradient(comm):
    model = nn.ParameterDict({key: nn.Parameter(torch.zeros(5)) for key in "abc"})
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), model.named_parameters(), comm=comm)
    model["b"].grad = torch.full((5,), float("nan") if comm.rank == comm.size - 1 else 1.0)
    optimizer.step()


LAWS = [laws, floats_have_the_bits_of_the_simulated_world, training_has_the_bits_of_the_simulated_world]
FAILURES = {
    other_k: "ranks disagree on call 0: rank 0 calls gtopk(numel=100, torch.float32, k=5), "
    "rank {last} calls gtopk(numel=100, torch.float32, k=6)",
    nan_gradient: "rank {last}: the gradient of 'b' is not finite",
}


@pytest.fixture(scope="module", params=WORLDS)
def outcomes(request, mpiexec, processes, tmp_path_factory):
    """All cases of one world and size, run in one launch: (size, {case: [outcome of each rank]})."""
    world, size = request.param
    report = tmp_path_factory.mktemp("sparse") / "report.json"
    for launch in (
        [mpiexec(size, __file__, world, report)] if world == "mpi" else processes(size, __file__, world, report)
    ):
        assert launch.returncode == 0, launch.stderr
    return size, json.loads(report.read_text())


@pytest.mark.parametrize("case", [case.__name__ for case in LAWS])
def test_laws(outcomes, case):
    errors = [outcome["error"] for outcome in outcomes[1][case] if "error" in outcome]
    assert not errors, errors[0]


@pytest.mark.parametrize("case", FAILURES)
def test_the_same_reason_on_all_ranks(outcomes, case):
    size, cases = outcomes
    if size == 1 and case is other_k:
        assert cases[case.__name__] == [{}]  # nobody to disagree with
        return
    reasons = {outcome.get("reason", str(outcome)) for outcome in cases[case.__name__]}
    assert len(reasons) == 1, reasons
    assert reasons.pop().startswith(FAILURES[case].format(last=size - 1))


def mpi_world():
    """(a new communicator, gather to rank 0, rank)."""
    from mpi4py import MPI

    return MPI.COMM_WORLD.Dup, MPI.COMM_WORLD.gather, MPI.COMM_WORLD.rank


def gloo_world():
    """(a new group, gather to all, rank)."""
    import torch.distributed as dist

    def gather(outcome):
        outcomes = [None] * dist.get_world_size()
        dist.all_gather_object(outcomes, outcome)
        return outcomes

    dist.init_process_group("gloo")
    return dist.new_group, gather, dist.get_rank()


def main(world, report):
    fresh, gather, rank = {"mpi": mpi_world, "gloo": gloo_world}[world]()
    outcomes = {}
    for case in [*LAWS, *FAILURES]:
        outcome = {}
        try:
            case(as_communicator(fresh()))  # a failed one is of no use to the next case
        except CollectiveError as error:
            outcome["reason"] = str(error)
        except BaseException:
            outcome["error"] = traceback.format_exc()
        outcomes[case.__name__] = gather(outcome)
    if rank == 0:
        with open(report, "w") as file:
            json.dump(outcomes, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
