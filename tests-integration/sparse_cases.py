"""Sparse collectives on real ranks: the laws, the bits of the simulated world, wrong calls; for on_ranks.py."""

from __future__ import annotations

import time

import pytest
import torch
from communicators import SimulatedWorld, allgather, testing
from data_parallel import DistributedOptimizer
from data_parallel.schemes.table import COMPRESSORS
from sparse_collectives import (
    ALGORITHMS,
    sparse_allreduce,
    sparse_allreduce_array,
    sparse_allreduce_array_async,
    sparse_allreduce_async,
)
from sparse_collectives.algorithms.table import resolve
from sparse_compress import SparseVector, TopK, topk
from torch import nn

SHAPES = [  # elements, entries given, k, dtype
    (1, 1, 1, torch.float32),
    (7, 7, 2, torch.float64),
    (1000, 10, 20, torch.float32),
    (4096, 4096, 4096, torch.float32),
]


SPARSE = [name for name, entry in ALGORITHMS.items() if entry.selects]


def vectors(size, numel, entries, dtype=torch.float32):
    """The same on every rank, one for each, with ties."""
    generator = torch.Generator().manual_seed(numel)
    return [topk(torch.randint(-9, 10, (numel,), generator=generator).to(dtype), entries) for _ in range(size)]


def laws(comm):
    for name, options in [(name, o) for name, entry in ALGORITHMS.items() for o in entry.variants(comm.size)]:
        entry = resolve(name, options, size=comm.size)
        for numel, entries, k, dtype in SHAPES:

            def traffic(rank, size, entry=entry, k=k, numel=numel, dtype=dtype):
                sent = entry.sent(rank, size, k, numel, dtype)
                return (sent.nbytes, sent.messages)

            testing.check_laws(
                lambda c, sparse, name=name, options=options, k=k: sparse_allreduce(
                    sparse, c, k=k, algorithm=name, options=options
                ),
                vectors(comm.size, numel, entries, dtype),
                dense=SparseVector.to_dense,
                total=lambda reduction: reduction.total.to_dense(),
                dropped=lambda reduction: reduction.dropped.to_dense(),
                traffic=traffic if entry.exact else None,
                comm=comm,
            )


def laws_in_fewer_bytes(comm):
    for name in SPARSE:
        for wire in ("bf16-packed", "int8"):
            testing.check_laws(
                lambda c, sparse, name=name, wire=wire: sparse_allreduce(sparse, c, k=20, algorithm=name, wire=wire),
                [SparseVector(v.indices, 1000 * v.values + 1, v.numel) for v in vectors(comm.size, 1000, 30)],
                dense=SparseVector.to_dense,
                total=lambda reduction: reduction.total.to_dense(),
                dropped=lambda reduction: reduction.dropped.to_dense(),
                comm=comm,
            )


def bytes_stay_within_the_bound(comm):
    """Where they depend on the data, `sent` is the most."""
    for name, entry in ALGORITHMS.items():
        for numel, entries, k, dtype in SHAPES:
            before, sparse = comm.bytes_sent, vectors(comm.size, numel, entries, dtype)[comm.rank]
            sparse_allreduce(sparse, comm, k=k, algorithm=name)
            assert comm.bytes_sent - before <= entry.sent(comm.rank, comm.size, k, numel, dtype).nbytes


def floats_have_the_bits_of_the_simulated_world(comm):
    inputs = [torch.randn(500, generator=torch.Generator().manual_seed(rank)) for rank in range(comm.size)]
    for name in ALGORITHMS:

        def call(c, name=name):
            works = [sparse_allreduce_async(topk(inputs[c.rank] * i, 50), c, k=50, algorithm=name) for i in (1, 2, 3)]
            return [work.wait() for work in reversed(works)]

        for real, simulated in zip(call(comm), SimulatedWorld(comm.size).run(call)[comm.rank], strict=True):
            assert torch.equal(real.total.to_dense(), simulated.total.to_dense())
            assert torch.equal(real.dropped.to_dense(), simulated.dropped.to_dense())


def inputs_may_change_at_once(comm):
    """The background sums what was given; results may be written into while messages are still under way."""
    generator = torch.Generator().manual_seed(3)
    values = torch.randint(-9, 10, (comm.size, 5, 600), generator=generator).float()
    for name in ALGORITHMS:
        works = []
        for call, x in enumerate(values[comm.rank].clone()):
            whole = name == "dense" and call % 2
            k = {} if whole else {"k": 600}
            given = x.numpy() if call % 2 else topk(x, 600)
            start = sparse_allreduce_array_async if call % 2 else sparse_allreduce_async
            works.append(start(given, comm, algorithm=name, **k))
            (x if call % 2 else given.values).fill_(777)
        for call, work in enumerate(works):
            total = work.wait().total
            dense = torch.from_numpy(total) if call % 2 else total.to_dense()
            assert torch.equal(dense, values[:, call].sum(0)), (name, call)
            (dense if call % 2 else total.values).fill_(777)


def train(comm, name):
    """A few steps with integer gradients, so that a native dense sum has the same bits too."""
    model = nn.ParameterDict({key: nn.Parameter(torch.full((5, 3), float(comm.rank))) for key in "abc"})
    optimizer = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.5),
        model.named_parameters(),
        comm=comm,
        algorithm=name,
        options={"rank": 1, "dense_steps": 1} if name == "powersgd" else None,
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
    for turn, name in enumerate([*ALGORITHMS, *COMPRESSORS]):
        found = allgather(train(comm, name), comm)
        if turn % comm.size == comm.rank:  # one rank simulates
            simulated = SimulatedWorld(comm.size).run(lambda c, name=name: train(c, name))
            assert all(map(torch.equal, found, simulated)), name


def other_k(comm):
    sparse_allreduce(topk(torch.ones(100), 5), comm, k=5 + last(comm))


def other_algorithm(comm):
    algorithm = "topk-allgather" if last(comm) else "gtopk"
    sparse_allreduce(topk(torch.ones(100), 5), comm, k=5, algorithm=algorithm)


def other_wire(comm):
    sparse_allreduce(topk(torch.ones(100), 5), comm, k=5, wire="int8" if last(comm) else "fp32")


def other_dtype(comm):
    sparse_allreduce(topk(torch.ones(100, dtype=torch.float64 if last(comm) else torch.float32), 5), comm, k=5)


def other_numel(comm):
    sparse_allreduce(topk(torch.ones(100 + last(comm)), 5), comm, k=5)


def never_called(comm):
    if last(comm):
        time.sleep(2.5)
    works = [sparse_allreduce_async(topk(torch.ones(9), 3), comm, k=3, timeout=1.0)]
    works[0].wait()


def nan_gradient(comm):
    model = nn.ParameterDict({key: nn.Parameter(torch.zeros(5)) for key in "abc"})
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), model.named_parameters(), comm=comm)
    model["b"].grad = torch.full((5,), float("nan") if last(comm) else 1.0)
    optimizer.step()


def wrong_arguments(comm):
    """Wrong by themselves, so that every rank says so at once, and the communicator is as good as before."""
    sparse = topk(torch.ones(9), 3)
    for wrong, error, said in (
        (lambda: sparse_allreduce(sparse, comm, k=0), ValueError, "expected the most entries"),
        (lambda: sparse_allreduce(sparse, comm, k=3, algorithm="topk"), ValueError, "known: dense"),
        (lambda: sparse_allreduce_array(torch.ones(9).to_sparse(), comm, k=3), TypeError, "use .to_dense"),
        (lambda: sparse_allreduce([1.0], comm, k=3), TypeError, "expected a SparseVector"),
        (lambda: sparse_allreduce(topk(torch.ones(0), 3), comm, k=3), ValueError, "nothing to sum"),
        (lambda: topk(torch.ones(9, dtype=torch.int64), 3), TypeError, "expected"),
    ):
        with pytest.raises(error, match=said):
            wrong()
    assert len(sparse_allreduce(sparse, comm, k=3).total) == 3


def last(comm):
    return comm.rank == comm.size - 1


LAWS = [
    laws,
    laws_in_fewer_bytes,
    bytes_stay_within_the_bound,
    floats_have_the_bits_of_the_simulated_world,
    inputs_may_change_at_once,
    training_has_the_bits_of_the_simulated_world,
    wrong_arguments,
]
CALL = "ranks disagree on call 0: rank 0 calls gtopk(numel=100, torch.float32, k=5), rank {last} calls "
FAILURES = {
    other_wire: CALL.replace("{last} calls ", "{last} calls gtopk(numel=100, torch.float32, k=5, wire=int8)"),
    other_k: CALL + "gtopk(numel=100, torch.float32, k=6)",
    other_algorithm: CALL + "topk-allgather(numel=100, torch.float32, k=5)",
    other_dtype: CALL + "gtopk(numel=100, torch.float64, k=5)",
    other_numel: CALL + "gtopk(numel=101, torch.float32, k=5)",
    never_called: "timed out after 1 s: rank",
    nan_gradient: "rank {last}: the gradient of 'b' is not finite",
}
