"""Errors of one rank end the command on all ranks, with the same reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from communicators import Communicator, allgather

T = TypeVar("T")

REASON_BYTES = 1000


class NoAdvice(Exception):  # noqa: N818 - it is what the command says
    """No advice can be given; the text says why and what to do."""


def all_or_none(attempt: Callable[[], T], comm: Communicator) -> T:
    """The attempt's result; collective. If it raises NoAdvice on any rank, all ranks raise the first one's reason."""
    own: NoAdvice | None = None
    try:
        result = attempt()
    except NoAdvice as reason:
        own = reason
    for rank, said in enumerate(_reasons("" if own is None else str(own), comm)):
        if said:
            raise NoAdvice(f"rank {rank}: {said}" if comm.size > 1 else said) from own
    return result


def _reasons(own: str, comm: Communicator) -> list[str]:
    """Gathers the reasons of all ranks, empty for a rank without one."""
    message = own.encode()[:REASON_BYTES]
    padded = torch.frombuffer(bytearray(message.ljust(REASON_BYTES, b"\0")), dtype=torch.uint8)
    gathered = allgather(padded.to(comm.device), comm)
    return [bytes(reason.tolist()).rstrip(b"\0").decode(errors="ignore") for reason in gathered]
