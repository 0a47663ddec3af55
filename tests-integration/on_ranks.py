"""Runs cases on real ranks, many in one launch; rank 0 writes what came of each.

A module of cases has LAWS, functions that must return, and may have FAILURES: function -> how the reason begins that
all ranks must give. A case takes as much as it names of: a communicator of its own, the device that data lie on.

usage, on every rank: python on_ranks.py REPORT.json WORLD:MODULE=CASE,CASE ...   (worlds: see WORLDS; of one kind side
by side)
"""

from __future__ import annotations

import gc
import importlib
import inspect
import itertools
import json
import os
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # as late as torch imports it, it would keep the group there is, whose threads then race
from communicators import CollectiveError, as_communicator

HOST = torch.device("cpu")


class MPI:
    """The first `size` ranks that mpiexec started; the others wait for them, asleep."""

    device = HOST

    def __init__(self, size):
        from mpi4py import MPI

        self.everybody = MPI.COMM_WORLD
        self.takes_part = self.everybody.rank < size
        self.world = self.everybody.Split(self.takes_part)
        self.rank, self.size = self.world.rank, self.world.size

    def fresh(self):
        return as_communicator(self.world.Dup())

    def gather(self, outcome):
        asleep_until_all_come(self.world, nap=0.001)
        return self.world.gather(outcome)

    def end(self):
        asleep_until_all_come(self.everybody, nap=0.02)


def asleep_until_all_come(comm, nap):
    """Whoever waits in a call of MPI's keeps a core busy, which those that it waits for have need of."""
    come = comm.Ibarrier()
    while not come.Test():
        time.sleep(nap)


class Rendezvous:
    """Of processes that have no group yet; the packages take each for one that is alone.

    It keeps the groups that cases destroy until those are over, and so longer than their DDP modules live. One that is
    freed last would end the group while it holds the GIL: gloo's thread is joined, and that may be waiting for the GIL
    to free an allreduce of the last backward, which holds Python's context. Both would wait for ever, and the peers.
    """

    def __init__(self):
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        rank, size, host, port = (os.environ.pop(name) for name in names)
        self.rank, self.size, self.opened = int(rank), int(size), 0
        self.store = dist.TCPStore(host, int(port), self.size, self.rank == 0)
        self._groups: list[Any] = []

    def open_group(self, backend="gloo"):
        """The default group of all ranks, another one each time."""
        self.opened += 1
        store = dist.PrefixStore(str(self.opened), self.store)
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size)
        dist.all_reduce(torch.zeros(1))  # a rank that ends the group at once would cut off one that connects still
        self._groups.append(dist.group.WORLD)

    def end_groups(self):
        """Of all that were opened; modules in garbage go first."""
        if dist.is_initialized():  # what a failed case left open
            dist.destroy_process_group()
        gc.collect()
        self._groups.clear()  # Python lets go of the GIL for that

    def gather(self, outcome):
        outcomes = [None] * self.size
        dist.all_gather_object(outcomes, outcome)
        return outcomes


class NoGroup:
    """Cases get the rendezvous in place of a communicator, and open groups themselves."""

    device, takes_part = HOST, True

    def __init__(self, rendezvous):
        self.rendezvous, self.rank, self.size = rendezvous, rendezvous.rank, rendezvous.size
        self.end = rendezvous.end_groups

    def fresh(self):
        return self.rendezvous

    def gather(self, outcome):
        self.end()
        self.rendezvous.open_group()
        outcomes = self.rendezvous.gather(outcome)
        self.end()
        return outcomes


class ProcessGroup:
    """A process group, and new groups of all its ranks."""

    takes_part = True

    def __init__(self, rendezvous, device=HOST, *, backend="gloo", transport=None):
        rendezvous.open_group(backend)
        self.rank, self.size = rendezvous.rank, rendezvous.size
        self.gather, self.end = rendezvous.gather, rendezvous.end_groups
        self.device, self.transport = device, transport
        if device.type == "cuda":
            torch.cuda.set_device(device)

    def fresh(self):
        return as_communicator(dist.new_group(), transport=self.transport)


class Untagged(ProcessGroup):
    """Messages without tags or lengths, as NCCL's are, over gloo."""

    def fresh(self):
        from untagged_gloo import untagged_communicator

        return untagged_communicator(dist.new_group(), self.device.type)


def pretend():
    from devices import DEVICE

    return DEVICE


def gpu(rendezvous):
    return torch.device("cuda", rendezvous.rank % torch.cuda.device_count())


WORLDS = {
    "no-group": NoGroup,
    "gloo": ProcessGroup,
    "untagged": Untagged,
    "pretend-gloo": lambda rendezvous: ProcessGroup(rendezvous, pretend()),
    "pretend-untagged": lambda rendezvous: Untagged(rendezvous, pretend()),
    "cuda-gloo": lambda rendezvous: ProcessGroup(rendezvous, gpu(rendezvous)),
    "cuda-nccl": lambda rendezvous: ProcessGroup(
        rendezvous, gpu(rendezvous), backend="cpu:gloo,cuda:nccl", transport="nccl"
    ),
}
"""mpi-SIZE besides, which meets by itself; gloo's ranks may share a GPU, nccl wants one for each."""


def outcome_of(case, *given: Any):
    """The reason or error of a case on this rank, if it has one, and how long it took."""
    begin, outcome = time.monotonic(), {}
    try:
        case(*given[: len(inspect.signature(case).parameters)])
    except CollectiveError as error:
        outcome["reason"] = str(error).replace(" on cpu", "")  # the facts of an untagged call name the device
    except BaseException:
        outcome["error"] = traceback.format_exc()
        print(outcome["error"], file=sys.stderr, flush=True)  # the report may never come, if others wait for this rank
    return {**outcome, "seconds": time.monotonic() - begin}


def outcomes_of(cases, world):
    """{item: {case: [outcome of each rank]}}; failures side by side, since they mostly wait for time-outs.

    cases: {item: names}.
    """
    outcomes, failures = {item: {} for item in cases}, []
    for item, names in cases.items():
        module = importlib.import_module(item.partition(":")[2])
        for case in module.LAWS:
            if case.__name__ in names:
                comm = world.fresh()
                outcomes[item][case.__name__] = world.gather(outcome_of(case, comm, world.device))
        failures += [(item, case) for case in getattr(module, "FAILURES", ()) if case.__name__ in names]
    comms = [world.fresh() for _ in failures]  # a failed one is of no use to the next case
    with ThreadPoolExecutor(max(len(failures), 1)) as side_by_side:
        futures = [
            side_by_side.submit(outcome_of, case, comm, world.device)
            for (_, case), comm in zip(failures, comms, strict=True)
        ]
    for (item, case), future in zip(failures, futures, strict=True):
        outcomes[item][case.__name__] = world.gather(future.result())
    return outcomes


def main(report, *items):
    rendezvous, outcomes = None, {}
    for name, group in itertools.groupby(items, lambda item: item.partition(":")[0]):
        by_mpi = name.startswith("mpi-")
        if not by_mpi and rendezvous is None:
            rendezvous = Rendezvous()
        world = MPI(int(name.removeprefix("mpi-"))) if by_mpi else WORLDS[name](rendezvous)
        parts = (item.partition("=") for item in group)
        cases = {item: set(names.split(",")) for item, _, names in parts}
        if world.takes_part:
            outcomes |= outcomes_of(cases, world)
        world.end()
        if world.takes_part and world.rank == 0:
            with open(report, "w") as file:
                json.dump(outcomes, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
