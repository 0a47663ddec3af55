"""A collective algorithm as a schedule: what a rank sends and receives, round by round, without doing any I/O.

The word is LibNBC's (Hoefler et al., SC 2007). A schedule is a generator that yields `Round`s and is sent what it
received; its return value is the result of the collective. A communicator carries the rounds, see `run` and `start`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

SLOT_BYTES = 16
"""Bytes of a message beyond its body: the communicator's own, which stamps call, round and sender there."""

T = TypeVar("T")


class Payload:
    """A message: a body of bytes, behind a slot that belongs to the communicator.

    One piece of memory holds both, so that they travel together. A payload is not changed any more once a `Round` was
    yielded with it; it may be sent again, and what was received may be handed on.

    Args:
        memory: Contiguous 1-D uint8: SLOT_BYTES bytes that are free to be overwritten, then the body. Not copied.

    Raises:
        ValueError: Memory of another form.
    """

    __slots__ = ("memory",)

    def __init__(self, memory: Tensor) -> None:
        flat = memory.dtype == torch.uint8 and memory.dim() == 1 and memory.is_contiguous()
        if not flat or memory.numel() < SLOT_BYTES:
            raise ValueError(
                f"a payload's memory is {memory.dtype} of shape {tuple(memory.shape)} and strides {memory.stride()}, "
                f"expected contiguous 1-D uint8 that begins with a free slot of {SLOT_BYTES} bytes: Payload.of(tensor) "
                "makes one of any tensor"
            )
        self.memory = memory

    @classmethod
    def allocate(cls, nbytes: int, device: torch.device | None = None) -> Payload:
        """Allocates a payload; the caller fills in the body.

        Args:
            nbytes: Bytes of the body.
            device: Device of the payload, default the CPU.
        """
        return cls(torch.empty(SLOT_BYTES + nbytes, dtype=torch.uint8, device=device or "cpu"))

    @classmethod
    def of(cls, tensor: Tensor) -> Payload:
        """Payload with a copy of a tensor's bytes.

        Args:
            tensor: Tensor of any shape and dtype.
        """
        made = cls.allocate(tensor.numel() * tensor.dtype.itemsize, tensor.device)
        made.view(tensor.dtype).copy_(tensor.detach().reshape(-1))
        return made

    @property
    def body(self) -> Tensor:
        """Bytes of the body: a 1-D view."""
        return self.memory[SLOT_BYTES:]

    @property
    def nbytes(self) -> int:
        """Bytes of the body: the size that a receive names."""
        return self.memory.numel() - SLOT_BYTES

    @property
    def wire_nbytes(self) -> int:
        """Bytes that travel, slot included."""
        return self.memory.numel()

    def view(self, dtype: torch.dtype) -> Tensor:
        """The body as a 1-D tensor of this dtype, no copy.

        Args:
            dtype: Type that its bytes are read as.
        """
        return self.body.view(dtype)

    def clone(self) -> Payload:
        """Copy in memory of its own."""
        return Payload(self.memory.clone())

    @classmethod
    def on_host(cls, nbytes: int, *, pinned: bool) -> Payload:
        """Allocates a payload in host memory.

        Args:
            nbytes: Bytes of the body.
            pinned: Whether what it holds comes from, or goes to, a GPU of CUDA.
        """
        if pinned:
            return cls(torch.empty(SLOT_BYTES + nbytes, dtype=torch.uint8, pin_memory=True, device="cpu"))
        return cls(torch.from_numpy(np.empty(SLOT_BYTES + nbytes, dtype=np.uint8)))

    def to_host(self) -> Payload:
        """The payload in host memory: itself if it is there."""
        if self.memory.is_cpu:
            return self
        host = Payload.on_host(self.nbytes, pinned=self.memory.is_cuda)
        host.memory.copy_(self.memory)
        return host


Received: TypeAlias = dict[int, Payload]
"""Payloads that a round has received, by rank."""


@dataclass(frozen=True, slots=True)
class Round:
    """One round of messages of one rank; it ends when all of them are done.

    Attributes:
        sends: Payload by peer.
        recvs: Bytes of the body to receive, by peer.
        bounded: Whether what arrives may be shorter than `recvs` says, never longer; for sizes that depend on data.
            Alike on all ranks of the round. Goes through host memory where messages of a GPU bear no lengths (NCCL).
    """

    sends: Mapping[int, Payload] = field(default_factory=dict)
    recvs: Mapping[int, int] = field(default_factory=dict)
    bounded: bool = False


@dataclass(frozen=True, slots=True)
class Elapse:
    """Computation that a schedule does between rounds: simulated worlds charge it, real ones ignore it.

    Attributes:
        seconds: Duration of the computation, 0 or more.
    """

    seconds: float

    def __post_init__(self) -> None:
        if not self.seconds >= 0:
            raise ValueError(f"a computation takes 0 seconds or more, got {self.seconds}")


Schedule: TypeAlias = Generator[Round | Elapse, Received, T]
"""Generator that yields rounds, gets what was received in each (payloads by rank), and returns a T."""


def among(schedule: Schedule[T], members: Sequence[int], facts: str) -> Schedule[T]:
    """The schedule with the ranks `members`, in order, in place of 0, 1, …; facts: for errors."""
    positions = {member: position for position, member in enumerate(members)}
    received: Received | None = None
    try:
        while True:
            try:
                action = next(schedule) if received is None else schedule.send(received)
            except StopIteration as stop:
                return cast(T, stop.value)
            received = {
                positions[member]: payload for member, payload in (yield _named(action, members, facts)).items()
            }
    finally:
        schedule.close()


def _named(action: Round | Elapse, members: Sequence[int], facts: str) -> Round | Elapse:
    if not isinstance(action, Round):
        return action
    if strangers := [peer for peer in (*action.sends, *action.recvs) if not 0 <= peer < len(members)]:
        raise ValueError(f"{facts}: a group of {len(members)} ranks has no ranks {strangers}")
    sends = {members[peer]: payload for peer, payload in action.sends.items()}
    recvs = {members[peer]: nbytes for peer, nbytes in action.recvs.items()}
    return Round(sends, recvs, bounded=action.bounded)


def powers_of_two(*, below: int) -> Iterator[int]:
    """1, 2, 4, … less than `below`."""
    power = 1
    while power < below:
        yield power
        power *= 2


def largest_power_of_two(size: int) -> int:
    """The largest power of two that is at most `size`."""
    return 1 << (size.bit_length() - 1)
