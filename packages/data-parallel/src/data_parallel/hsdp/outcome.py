"""Outcome of a backward, shared by all ranks of a node: each exchanged another part with other nodes."""

from __future__ import annotations

import torch
from communicators import CollectiveError, Communicator, allgather, run, schedules


def agreed(error: CollectiveError | None, finite: bool, inside: Communicator) -> tuple[CollectiveError | None, bool]:
    """First error of any rank, and whether all results are finite. One message of a byte, more only after an error."""
    flags = torch.tensor([2 * (error is not None) + (not finite)], dtype=torch.uint8)
    gather = schedules.allgather_blocks(flags, [1] * inside.size, inside.rank, inside.size)
    found = [int(flag) for flag in run(gather, inside, facts="how a backward went")]
    if not any(flag & 2 for flag in found):
        return None, not any(found)
    return CollectiveError(told(str(error or ""), inside)), False


def told(own: str, inside: Communicator) -> str:
    """Text of the first rank that has any, on all ranks; "" if none has."""
    said = torch.tensor(list(own.encode(errors="replace")), dtype=torch.uint8)
    words = (bytes(each.tolist()).decode() for each in allgather(said, inside))
    return next((word for word in words if word), "")
