"""What can go wrong in a simulated world, as its tests ask for it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Dies:
    """Fault: the rank is gone when it would send its message number `message` (0 is its first), or at a virtual time.

    Every call of all ranks ends with an error that names it; signals and attempts go on among the others, who see it in
    `Signals.departed`. Of its own nothing goes on, and its result is None.
    at: virtual seconds, in place of `message`.
    """

    rank: int
    message: int = 0
    at: float | None = None


@dataclass(frozen=True)
class Corrupts:
    """Fault: the rank's message number `message` arrives with one bit flipped, number `bit` modulo the message's."""

    rank: int
    message: int = 0
    bit: int = 0
