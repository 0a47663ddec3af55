"""Broadcast by which all ranks begin with the same parameters, and the same settings."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

from communicators import Communicator, buckets_of, run, schedules
from torch import Tensor


def broadcast_parameters(named: Mapping[str, Tensor], comm: Communicator, *, what: str, settings: str) -> None:
    """Copies rank 0's parameters into those of every rank.

    what: the caller, named in errors; settings: what else ranks must share. A rank with other settings, or with
    parameters of other names, shapes, dtypes or order, is a CollectiveError on all ranks.
    """
    listed = [f"{name} {tuple(p.shape)} {p.dtype} {p.requires_grad}" for name, p in named.items()]
    elements = sum(p.numel() for p in named.values())
    facts = (
        f"{what}({settings}, {len(named)} parameters of {elements} elements, "
        f"names and shapes {zlib.crc32(';'.join(listed).encode()):08x})"
    )
    parameters = list(named.values())
    for bucket in buckets_of(parameters):
        flat = bucket.gather(parameters)
        schedule = schedules.broadcast(flat, comm.rank, comm.size)
        bucket.scatter(run(schedule, comm, facts=facts, device=flat.device), parameters)
