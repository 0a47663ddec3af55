"""Runs on real ranks: all cases for one number of ranks inside one launch; rank 0 writes what came of each.

usage, on every rank: python on_ranks.py mpi|gloo REPORT.json
"""

from __future__ import annotations

import json
import sys
import time
import traceback

import dense_cases
import partial_cases
import sparse_cases
from communicators import CollectiveError, as_communicator

LAWS = [*dense_cases.LAWS, *sparse_cases.LAWS, *partial_cases.LAWS]
FAILURES = {**dense_cases.FAILURES, **sparse_cases.FAILURES, **partial_cases.FAILURES}
"""Case -> how the reason begins that all ranks give."""


def mpi_world():
    """(a new communicator, gather, rank, size)."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    return world.Dup, world.gather, world.rank, world.size


def gloo_world():
    """(a new group, gather, rank, size)."""
    import torch.distributed as dist

    def gather(outcome):
        outcomes = [None] * dist.get_world_size()
        dist.all_gather_object(outcomes, outcome)
        return outcomes

    dist.init_process_group("gloo")
    return dist.new_group, gather, dist.get_rank(), dist.get_world_size()


def outcome_of(case, comm):
    """The reason or error of a case on this rank, if it has one, and how long it took."""
    begin, outcome = time.monotonic(), {}
    try:
        case(comm)
    except CollectiveError as error:
        outcome["reason"] = str(error)
    except BaseException:
        outcome["error"] = traceback.format_exc()
    return {**outcome, "seconds": time.monotonic() - begin}


def main(world, report):
    fresh, gather, rank, size = {"mpi": mpi_world, "gloo": gloo_world}[world]()
    outcomes = {}
    for case in [*LAWS, *(FAILURES if size > 1 else [])]:
        comm = as_communicator(fresh())  # a failed one is of no use to the next case
        outcomes[case.__name__] = gather(outcome_of(case, comm))
    if rank == 0:
        with open(report, "w") as file:
            json.dump(outcomes, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
