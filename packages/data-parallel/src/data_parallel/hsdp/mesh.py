"""Ranks between nodes, and those inside one: whether they make a grid, and what those of a node agree on.

The grid is looked at before anything is written.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from communicators import CollectiveError, Communicator, allgather, as_communicator, run, schedules
from torch.distributed.device_mesh import DeviceMesh

from data_parallel.hsdp.shards import Shard

EXPECTED = (
    "expected fully_shard(module, mesh=mesh['inside']) for every module and sparse_hsdp(model, mesh['between']), where "
    "mesh = init_device_mesh(device, (nodes, ranks), mesh_dim_names=('between', 'inside'))"
)


PLACE = "rank {} has place {} of {} inside its node"
Place = Sequence[int]
"""Number of a rank among all ranks, its place among those of its node, and how many those are."""


def joined(shards: Sequence[Shard], between: Any) -> tuple[Communicator, Communicator, list[int]]:
    """The ranks with this one's part, those of its node, and the numbers that the former have among all.

    ValueError on every rank where they make no grid.
    """
    if isinstance(between, DeviceMesh):
        if between.ndim != 1:
            names = between.mesh_dim_names
            raise ValueError(f"between is a DeviceMesh of {between.ndim} dimensions {names}, expected one; {EXPECTED}")
        between = between.get_group()
    comm = as_communicator(between)
    inside = as_communicator(shards[0].group.mesh_info.shard_process_group)
    own = torch.tensor([dist.get_rank(), inside.rank, inside.size], device="cpu")
    places = [place.tolist() for place in allgather(own, comm)]
    if wrong := _first_said(_complaint(shards, places), inside):
        raise ValueError(f"{wrong}; {EXPECTED}")
    here = [int(rank) for rank in allgather(torch.tensor([comm.rank], device="cpu"), inside)]
    if len(set(here)) > 1:
        raise ValueError(
            f"the ranks {_ranks(shards[0])} of one node are number {here} of those between nodes, expected the same "
            f"number for all: give them the nodes in the same order; {EXPECTED}"
        )
    return comm, inside, [rank for rank, *_ in places]


def agreed(error: CollectiveError | None, finite: bool, inside: Communicator) -> tuple[CollectiveError | None, bool]:
    """Outcome of a backward on all ranks of a node, of which each exchanged another part with other nodes.

    The first error, and whether all results are finite. One message of a byte, more only after an error.
    """
    flags = torch.tensor([2 * (error is not None) + (not finite)], dtype=torch.uint8, device="cpu")
    gather = schedules.allgather_blocks(flags, [1] * inside.size, inside.rank, inside.size)
    found = [int(flag) for flag in run(gather, inside, facts="how a backward went")]
    if not any(flag & 2 for flag in found):
        return None, not any(found)
    return CollectiveError(_first_said(str(error or ""), inside)), False


def _complaint(shards: Sequence[Shard], places: Sequence[Place]) -> str:
    """Reason why the places that this rank sees make no grid, else ""."""
    node = _ranks(shards[0])
    for shard in shards:
        if (other := _ranks(shard)) != node:
            return f"module {shard.name!r} is sharded over the ranks {other}, but {shards[0].name!r} over {node}"
    ranks = [rank for rank, *_ in places]
    if len(shared := [rank for rank in ranks if rank in node]) != 1:  # they have different parts of a parameter
        return f"between has the ranks {ranks}, of which {shared} share the parameters of this model as {node}"
    unlike = [place for place in places if place[1:] != places[0][1:]]
    said = ", ".join(PLACE.format(*place) for place in (places[0], *unlike[:1]))
    return f"between joins ranks that hold different parts: {said}" if unlike else ""


def _ranks(shard: Shard) -> list[int]:
    """Ranks, of all, that a module is sharded over."""
    return dist.get_process_group_ranks(shard.group.mesh_info.shard_process_group)


def _first_said(own: str, inside: Communicator) -> str:
    """Text of the first rank that has any, on all ranks; "" if none has."""
    said = torch.tensor(list(own.encode(errors="replace")), dtype=torch.uint8, device="cpu")
    words = (bytes(each.tolist()).decode() for each in allgather(said, inside))
    return next((word for word in words if word), "")
