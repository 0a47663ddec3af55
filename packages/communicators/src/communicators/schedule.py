"""A collective algorithm as a schedule: what a rank sends and receives, round by round, without doing any I/O.

The word is LibNBC's (Hoefler et al., SC 2007). A schedule is a generator that yields `Round`s and is sent what it
received; its return value is the result of the collective. A communicator carries the rounds, see `run` and `start`.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

SLOT_BYTES = 16
"""Bytes at the start of every payload for the communicator, which stamps call, round and sender there."""

T = TypeVar("T")
Received: TypeAlias = dict[int, Tensor]


@dataclass(frozen=True, slots=True)
class Round:
    """One round of messages of one rank; it ends when all of them are done.

    Attributes:
        sends: Peer -> payload, a contiguous 1-D uint8 tensor that starts with a free slot of `SLOT_BYTES` (see `frame`)
            and is not changed any more once it was yielded.
        recvs: Peer -> size in bytes, slot included.
        bounded: Whether what arrives may be shorter than `recvs` says, never longer; for sizes that depend on data.
            Alike on all ranks of the round. Goes through host memory where messages of a GPU bear no lengths (NCCL).
    """

    sends: Mapping[int, Tensor] = field(default_factory=dict)
    recvs: Mapping[int, int] = field(default_factory=dict)
    bounded: bool = False


@dataclass(frozen=True, slots=True)
class Elapse:
    """Computation that a schedule does between rounds: simulated worlds charge it, real ones ignore it.

    Attributes:
        seconds: Duration of the computation.
    """

    seconds: float


Schedule: TypeAlias = Generator[Round | Elapse, Received, T]
"""Generator that yields rounds, gets what was received in each (payloads by rank), and returns a T."""


def frame(tensor: Tensor) -> Tensor:
    """A payload that holds a tensor's bytes behind a free slot. Copies once.

    Args:
        tensor: Tensor of any shape and dtype.

    Returns:
        uint8, (SLOT_BYTES + tensor bytes,).
    """
    payload = torch.empty(framed_nbytes(tensor.numel(), tensor.dtype), dtype=torch.uint8, device=tensor.device)
    payload[:SLOT_BYTES].zero_()
    body(payload, tensor.dtype).copy_(tensor.detach().reshape(-1))
    return payload


def body(payload: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor behind a payload's slot, no copy.

    Args:
        payload: Result of `frame` on the rank that sent it.
        dtype: Type that its bytes are read as.

    Returns:
        A 1-D view.
    """
    return payload[SLOT_BYTES:].view(dtype)


def framed_nbytes(numel: int, dtype: torch.dtype) -> int:
    """Bytes of a payload that frames `numel` elements: the capacity to receive it."""
    return SLOT_BYTES + numel * dtype.itemsize
