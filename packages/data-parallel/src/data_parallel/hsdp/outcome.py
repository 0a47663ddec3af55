"""Outcome of a backward, shared by all ranks of a node: each exchanged another part with other nodes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from communicators import CollectiveError, Communicator, run, schedules

REASON_BYTES = 1024


class Outcome(NamedTuple):
    """Outcome of a backward. error: that of this rank's exchanges. finite: whether all their results are."""

    error: CollectiveError | None
    finite: bool


def agreed(own: Outcome, inside: Communicator) -> Outcome:
    """Outcome common to all ranks, with the first error. One message of a byte, more only after an error."""
    flags = torch.tensor([2 * (own.error is not None) + (not own.finite)], dtype=torch.uint8)
    found = [int(flag) for flag in gathered(flags, inside, facts="how a backward went")]
    if not any(flag & 2 for flag in found):
        return Outcome(None, not any(found))
    return Outcome(CollectiveError(told(str(own.error or ""), inside)), False)


def told(own: str, inside: Communicator) -> str:
    """Text of the first rank that has any, on all ranks; "" if none has. It is cut at `REASON_BYTES`."""
    said = own.encode()[:REASON_BYTES]
    given = torch.frombuffer(bytearray(said.ljust(REASON_BYTES)), dtype=torch.uint8)
    reasons = gathered(given, inside, facts="why a backward failed")
    words = (bytes(reason.tolist()).decode(errors="ignore").rstrip() for reason in reasons)
    return next((word for word in words if word), "")


def gathered(own: torch.Tensor, comm: Communicator, *, facts: str) -> list[torch.Tensor]:
    """Bytes of all ranks, as many of each."""
    blocks = schedules.allgather_blocks(own, [own.numel()] * comm.size, comm.rank, comm.size)
    return run(blocks, comm, facts=facts)
