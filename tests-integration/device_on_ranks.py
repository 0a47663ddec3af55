"""What is different where data are on a GPU: streams, futures, NCCL's order and its end. Rank 0 writes what came of it.

gloo stages through host memory, so its ranks may share one GPU; nccl wants one for each. Without GPUs: pretend-gloo,
pretend-untagged, on a device without hardware and over a line that is as NCCL's.

usage, on every rank: python device_on_ranks.py gloo|nccl|pretend-gloo|pretend-untagged REPORT.json
"""

from __future__ import annotations

import json
import sys
import time

import torch
import torch.distributed as dist
from communicators import (
    Round,
    SimulatedWorld,
    allgather,
    allreduce,
    as_communicator,
    frame,
    run,
    start,
)
from communicators import dense_schedules as schedules
from communicators.background.transport_communicator import TransportCommunicator
from communicators.worlds.nccl.untagged import UntaggedTransport
from communicators.worlds.process_group import Meeting, ProcessGroupTransport
from communicators.worlds.stores import store_of
from devices import DEVICE
from on_ranks import outcome_of
from sparse_collectives import ALGORITHMS, SparseHookState, sparse_allreduce, sparse_allreduce_async, sparse_hook
from sparse_compress import topk
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from untagged_gloo import UntaggedGloo


def device():
    if BACKEND.startswith("pretend"):
        return DEVICE
    return torch.device("cuda", dist.get_rank() % torch.cuda.device_count())


def communicator():
    group = dist.new_group()
    if BACKEND != "pretend-untagged":
        return as_communicator(group, transport="nccl" if BACKEND == "nccl" else None)
    tagged = ProcessGroupTransport(Meeting.of(group, "here"))
    line = UntaggedGloo(dist.PrefixStore("line", store_of(group)), group.rank(), group.size(), DEVICE.type)
    return TransportCommunicator(UntaggedTransport(tagged, line))


def integers(rank, numel, seed=0):
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(-9, 10, (numel,), generator=generator).float()


def dense_sums(comm):
    for numel in (0, 1, 7, 1000):
        x = [integers(rank, numel) for rank in range(comm.size)]
        for schedule in (schedules.ring_allreduce, schedules.halving_doubling_allreduce):
            mine = schedule(x[comm.rank].to(device()), comm.rank, comm.size)
            total = run(mine, comm, device=device())
            assert total.device == device()
            assert torch.equal(total.cpu(), sum(x))
        assert torch.equal(allreduce(x[comm.rank].to(device()), comm).cpu(), sum(x))
    assert [part.tolist() for part in allgather(torch.full((comm.rank,), 2.0, device=device()), comm)] == [
        [2.0] * rank for rank in range(comm.size)
    ]
    assert allreduce(torch.ones(3), comm).tolist() == [comm.size] * 3  # data in host memory go another way


def sparse_sums_have_the_bits_of_the_simulated_world(comm):
    for name in ALGORITHMS:

        def call(c, at, name=name):
            sparse = topk(integers(c.rank, 1000).to(at), 100)
            reduction = sparse_allreduce(sparse, c, k=100, algorithm=name)
            return reduction.total.to_dense().cpu(), reduction.dropped.to_dense().cpu()

        here, host = device(), torch.device("cpu")
        simulated, on_cpu = (SimulatedWorld(comm.size).run(lambda c, at=at: call(c, at)) for at in (here, host))
        total, dropped = call(comm, here)
        assert torch.equal(total, simulated[comm.rank][0]), name
        assert torch.equal(dropped, simulated[comm.rank][1]), name
        assert torch.equal(total, on_cpu[comm.rank][0]), name


def background(comm):
    """Inputs come from a busy stream and are let go at once; results are used on a stream of the caller's."""
    wide = 2000 if device().type == "cuda" else 2
    x, busy = integers(comm.rank, 100_000).to(device()), torch.randn(wide, wide, device=device())
    expected = sum(integers(rank, 100_000) for rank in range(comm.size))
    works = []
    for i in range(8):
        for _ in range(20):
            busy = (busy @ busy).clamp(-1, 1)
        mine = x + i
        works.append(start(schedules.ring_allreduce(mine, comm.rank, comm.size), comm, device=device()))
        del mine
        torch.full_like(x, float("nan"))  # would be given the memory of what was let go
    futures = [work.get_future().then(lambda done: done.wait() * 2) for work in works]
    for i, (work, future) in reversed(list(enumerate(zip(works, futures, strict=True)))):
        total = work.wait(timeout=60) + 0
        assert torch.equal(total.cpu(), expected + i * comm.size)
        assert torch.equal(future.wait().cpu(), (expected + i * comm.size) * 2)
    sparse = sparse_allreduce_async(topk(x, 500), comm, k=500).wait()
    assert torch.isfinite(sparse.total.values).all()


def ddp_hook(comm):
    """Σ of all gradients = Σ of what was applied + residuals, with a scaler and several buckets."""
    scaler = torch.amp.GradScaler(device().type, init_scale=2.0**10, growth_interval=1000)
    module = nn.Linear(40, 30, bias=False).to(device())
    wrapped = DistributedDataParallel(module, bucket_cap_mb=1e-3)
    state = SparseHookState(density=0.1, grad_scaler=scaler, named_parameters=module.named_parameters())
    wrapped.register_comm_hook(state, sparse_hook)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    given, applied = torch.zeros(30, 40), torch.zeros(30, 40)
    for step in range(6):
        optimizer.zero_grad()
        x = integers(comm.rank, 40, seed=step)
        scaler.scale(wrapped(x.to(device())).sum()).backward()
        scaler.unscale_(optimizer)
        given += x.expand(30, 40)
        applied += torch.round(module.weight.grad.cpu() * comm.size)
        scaler.step(optimizer)
        scaler.update()
    kept = state.state_dict()["distributed"]["residuals"]["weight"].cpu().view(30, 40)
    dist.all_reduce(given)
    dist.all_reduce(kept)
    assert torch.equal(given, applied + kept)


def other_sizes(comm):
    allreduce(torch.ones(5 + last(comm), device=device()), comm)


def other_order(comm):
    a, b = torch.ones(8, device=device()), torch.ones(9, device=device())
    for x in (a, b, *((b, a) if last(comm) else (a, b))):
        allreduce(x, comm)


def late_rank(comm):
    if last(comm):
        time.sleep(2.5)
    x = torch.ones(9, device=device())
    run(schedules.ring_allreduce(x, comm.rank, comm.size), comm, device=device(), timeout=1.0)


def a_rank_leaves_a_round(comm):
    """The others have launched what nobody will match: afterwards the device must be free again."""

    def schedule():
        for turn in range(2):
            if turn and last(comm):
                raise ZeroDivisionError("by hand")
            payloads = {peer: frame(torch.ones(3, device=device())) for peer in range(comm.size) if peer != comm.rank}
            yield Round(payloads, {peer: payload.numel() for peer, payload in payloads.items()})

    try:
        run(schedule(), comm, facts="broken", device=device())
    finally:
        torch.ones(3, device=device()).sum().item()
        if device().type == "cuda":
            torch.cuda.synchronize()


def last(comm):
    return comm.rank == comm.size - 1


LAWS = [dense_sums, sparse_sums_have_the_bits_of_the_simulated_world, background, ddp_hook]
FAILURES = {
    other_sizes: "ranks disagree on call 0",
    other_order: "ranks disagree on call 2",
    late_rank: "timed out after 1 s: rank",
    a_rank_leaves_a_round: "rank {last} failed in broken",
}


def main(report):
    dist.init_process_group("cpu:gloo,cuda:nccl" if BACKEND == "nccl" else "gloo")
    if device().type == "cuda":
        torch.cuda.set_device(device())
    outcomes = {}
    for case in [*LAWS, *FAILURES]:
        if case is ddp_hook and device() == DEVICE:
            continue  # DDP keeps to devices that it knows
        comm = as_communicator(None) if case is ddp_hook else communicator()
        gathered = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, outcome_of(case, comm))
        outcomes[case.__name__] = gathered
    if dist.get_rank() == 0:
        with open(report, "w") as file:
            json.dump(outcomes, file)


if __name__ == "__main__":
    BACKEND, report = sys.argv[1:]
    main(report)
