"""What holds of partial collectives on real ranks, where delays are real; every case takes a communicator."""

from __future__ import annotations

import random
import threading
import time

import torch
from communicators import CollectiveError, allgather, barrier, run, schedules
from partial_collectives import EagerSGD, PartialAllreduce
from replicas import refuse_unlike

STEPS = 12


def gives_and_gets(comm, quorum, seed, **settings):
    """Integer gradients after random delays, uneven step counts, a meeting half-way; all that was given arrives."""
    draw = random.Random(f"{seed}/{comm.rank}")
    like = [torch.zeros(257), torch.zeros(3, dtype=torch.float64)]
    given, got = [torch.zeros_like(one) for one in like], [torch.zeros_like(one) for one in like]
    rounds = []

    def apply(results):
        for result in results:
            rounds.append(result.round * 4096 + sum(1 << rank for rank in result.contributors))
            for sum_, total in zip(got, result.total, strict=True):
                sum_ += total

    with PartialAllreduce(like, comm, quorum=quorum, seed=seed, max_staleness=3, **settings) as partial:
        for half in range(2):
            for step in range(STEPS - 3 * comm.rank):
                time.sleep(draw.choice([0.0, 0.0, 1e-3, 8e-3]))
                gradient = [torch.full_like(one, 1 + step + 100 * comm.rank + half) for one in like]
                for sum_, one in zip(given, gradient, strict=True):
                    sum_ += one
                apply(partial.allreduce(gradient))
            if half == 0:
                apply(partial.synchronize())
        apply(partial.finish())
    for mine, theirs in zip(given, got, strict=True):
        assert torch.equal(sum(allgather(mine, comm)), theirs), f"lost: {quorum=}, {seed=}"
    assert len({tuple(each.tolist()) for each in allgather(torch.tensor(rounds), comm)}) == 1


def partial_solo(comm):
    gives_and_gets(comm, "solo", 1)


def partial_majority(comm):
    gives_and_gets(comm, "majority", 2)


def partial_quorum_with_grace(comm):
    gives_and_gets(comm, min(2, comm.size), 3, grace=2e-3)


def partial_full(comm):
    gives_and_gets(comm, comm.size, 4)


def eager_sgd(comm):
    """Momentum, rates by round and random delays: the same parameters on all ranks."""
    draw, model = random.Random(comm.rank), torch.nn.Linear(20, 3)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 5, gamma=0.5)
    with EagerSGD(inner, model.named_parameters(), comm=comm, scheduler=scheduler) as optimizer:
        for step in range(STEPS + comm.rank):
            time.sleep(draw.choice([0.0, 1e-3, 5e-3]))
            inputs = torch.randn(4, 20, generator=torch.Generator().manual_seed(step + 100 * comm.rank))
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
    refuse_unlike(dict(model.named_parameters()), comm)


def partial_leaves_no_thread(comm):
    """A communicator of gloo keeps threads of its own; those of partial rounds end with these."""
    counts = []
    for _ in range(10):
        with PartialAllreduce(torch.zeros(4), comm, quorum=comm.size) as partial:
            partial.allreduce(torch.ones(4))
            list(partial.finish())
        counts.append(threading.active_count())
    end = time.monotonic() + 10
    while threading.active_count() > counts[2] + 2 and time.monotonic() < end:  # some end a little later
        time.sleep(0.01)
    assert threading.active_count() <= counts[2] + 2, (counts, threading.enumerate())


def partial_beside_other_calls(comm):
    """Rounds go on in the background while the caller's own collectives come in between."""
    with PartialAllreduce(torch.zeros(4), comm, quorum="solo") as partial:
        for _ in range(6):
            partial.allreduce(torch.ones(4))
        barrier(comm)
        results = list(partial.finish())
    assert all(result.weight == result.deposits for result in results)


def partial_fragments_in_few_bits(comm):
    """They take turns, and nothing is lost."""
    draw, sizes = random.Random(comm.rank), (300, 7, 1000)
    like = [[torch.zeros(numel)] for numel in sizes]
    given, applied = ([torch.zeros(numel) for numel in sizes] for _ in range(2))

    def own(fragment):
        x = torch.tensor([float(draw.randint(-99, 99)) for _ in range(sizes[fragment])])
        given[fragment] += x
        return [x], 1.0

    with PartialAllreduce(like, comm, quorum="majority", compress="int2") as partial:
        for _ in range(STEPS + comm.rank):
            partial.give(own)
            time.sleep(draw.choice([0.0, 1e-3, 5e-3]))
            for result in partial.take():
                applied[result.fragment] += result.total[0]
        for result in partial.finish({1: own(1), 2: own(2)}):
            applied[result.fragment] += result.total[0]
        residuals = torch.cat([one for each in partial.residuals for one in each])
    held = run(schedules.allreduce(torch.cat(given) - residuals, comm.rank, comm.size), comm, facts="held")
    assert torch.equal(torch.cat(applied), held)


def gives_up(comm):
    """An exception in one rank's own code."""
    try:
        with PartialAllreduce(torch.zeros(4), comm) as partial:
            for step in range(100):
                if comm.rank == comm.size - 1 and step == 3:
                    raise ValueError("mine")
                partial.allreduce(torch.ones(4))
    except ValueError as error:
        raise CollectiveError(f"rank {comm.rank} gave up its partial allreduce: ValueError: {error}") from error


def differs(comm):
    PartialAllreduce(torch.zeros(4 + comm.rank), comm)


LAWS = [
    partial_solo,
    partial_majority,
    partial_quorum_with_grace,
    partial_full,
    partial_fragments_in_few_bits,
    eager_sgd,
    partial_leaves_no_thread,
    partial_beside_other_calls,
]
FAILURES = {
    gives_up: "rank {last} gave up its partial allreduce: ValueError: mine",
    differs: "ranks disagree on call 0: rank 0 calls PartialAllreduce((4,)",
}
