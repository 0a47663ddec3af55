"""Faults of a simulated world, as its tests ask for them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Dies:
    """Fault: a rank is gone when it would send a message, or at a virtual time.

    Every call of all ranks ends with an error that names it; signals and attempts go on among the others, who see it in
    `Signals.departed`. Nothing of its own goes on, and its result is None.

    Attributes:
        rank: Rank that dies.
        message: The number of the message that it does not send any more; 0 is its first.
        at: Virtual seconds, in place of `message`.
    """

    rank: int
    message: int = 0
    at: float | None = None


@dataclass(frozen=True)
class Corrupts:
    """Fault: a message arrives with one bit flipped.

    Attributes:
        rank: Rank that sends the message.
        message: Its number among those that the rank sends, from 0.
        bit: Number of the flipped bit, modulo the message's number of bits.
    """

    rank: int
    message: int = 0
    bit: int = 0
