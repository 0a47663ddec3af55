"""What is different where data are on a GPU: streams, futures, NCCL's order and its end; for on_ranks.py."""

from __future__ import annotations

import time

import torch
from communicators import (
    Payload,
    Round,
    SimulatedWorld,
    allgather,
    allreduce,
    run,
    schedules,
    start,
)
from sparse_collectives import ALGORITHMS, sparse_allreduce, sparse_allreduce_async
from sparse_compress import topk


def integers(rank, numel, seed=0):
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(-9, 10, (numel,), generator=generator).float()


def dense_sums(comm, device):
    for numel in (0, 1, 7, 1000):
        x = [integers(rank, numel) for rank in range(comm.size)]
        for schedule in (schedules.ring_allreduce, schedules.halving_doubling_allreduce, schedules.doubling_allreduce):
            mine = schedule(x[comm.rank].to(device), comm.rank, comm.size)
            total = run(mine, comm, device=device)
            assert total.device == device
            assert torch.equal(total.cpu(), sum(x))
        assert torch.equal(allreduce(x[comm.rank].to(device), comm).cpu(), sum(x))
    assert [part.tolist() for part in allgather(torch.full((comm.rank,), 2.0, device=device), comm)] == [
        [2.0] * rank for rank in range(comm.size)
    ]
    assert allreduce(torch.ones(3), comm).tolist() == [comm.size] * 3  # data in host memory go another way


def sparse_sums_have_the_bits_of_the_simulated_world(comm, device):
    for name in ALGORITHMS:

        def call(c, at, name=name):
            sparse = topk(integers(c.rank, 1000).to(at), 100)
            reduction = sparse_allreduce(sparse, c, k=100, algorithm=name)
            return reduction.total.to_dense().cpu(), reduction.dropped.to_dense().cpu()

        host = torch.device("cpu")
        simulated, on_cpu = (SimulatedWorld(comm.size).run(lambda c, at=at: call(c, at)) for at in (device, host))
        total, dropped = call(comm, device)
        assert torch.equal(total, simulated[comm.rank][0]), name
        assert torch.equal(dropped, simulated[comm.rank][1]), name
        assert torch.equal(total, on_cpu[comm.rank][0]), name


def background(comm, device):
    """Inputs come from a busy stream and are let go at once; results are used on a stream of the caller's."""
    wide = 2000 if device.type == "cuda" else 2
    x, busy = integers(comm.rank, 100_000).to(device), torch.randn(wide, wide, device=device)
    expected = sum(integers(rank, 100_000) for rank in range(comm.size))
    works = []
    for i in range(8):
        for _ in range(20):
            busy = (busy @ busy).clamp(-1, 1)
        mine = x + i
        works.append(start(schedules.ring_allreduce(mine, comm.rank, comm.size), comm, device=device))
        del mine
        torch.full_like(x, float("nan"))  # would be given the memory of what was let go
    futures = [work.get_future().then(lambda done: done.wait() * 2) for work in works]
    for i, (work, future) in reversed(list(enumerate(zip(works, futures, strict=True)))):
        total = work.wait(timeout=60) + 0
        assert torch.equal(total.cpu(), expected + i * comm.size)
        assert torch.equal(future.wait().cpu(), (expected + i * comm.size) * 2)
    sparse = sparse_allreduce_async(topk(x, 500), comm, k=500).wait()
    assert torch.isfinite(sparse.total.values).all()


def other_sizes(comm, device):
    allreduce(torch.ones(5 + last(comm), device=device), comm)


def other_order(comm, device):
    a, b = torch.ones(8, device=device), torch.ones(9, device=device)
    for x in (a, b, *((b, a) if last(comm) else (a, b))):
        allreduce(x, comm)


def late_rank(comm, device):
    if last(comm):
        time.sleep(2.5)
    x = torch.ones(9, device=device)
    run(schedules.ring_allreduce(x, comm.rank, comm.size), comm, device=device, timeout=1.0)


def a_rank_leaves_a_round(comm, device):
    """The others have launched what nobody will match: afterwards the device must be free again."""

    def schedule():
        for turn in range(2):
            if turn and last(comm):
                raise ZeroDivisionError("by hand")
            payloads = {
                peer: Payload.of(torch.ones(3, device=device)) for peer in range(comm.size) if peer != comm.rank
            }
            yield Round(payloads, {peer: payload.nbytes for peer, payload in payloads.items()})

    try:
        run(schedule(), comm, facts="broken", device=device)
    finally:
        torch.ones(3, device=device).sum().item()
        if device.type == "cuda":
            torch.cuda.synchronize()


def last(comm):
    return comm.rank == comm.size - 1


LAWS = [dense_sums, sparse_sums_have_the_bits_of_the_simulated_world, background]
FAILURES = {
    other_sizes: "ranks disagree on call 0",
    other_order: "ranks disagree on call 2",
    late_rank: "timed out after 1 s: rank",
    a_rank_leaves_a_round: "rank {last} failed in broken",
}
