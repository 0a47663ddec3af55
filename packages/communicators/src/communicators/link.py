"""The α-β model of a link: a message of b bytes takes α + β·b seconds (Hockney 1994)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """Cost of a message. The default is 1 Gbit/s Ethernet at 50 µs.

    Attributes:
        alpha: Seconds per message.
        beta: Seconds per byte.
    """

    alpha: float = 50e-6
    beta: float = 8e-9

    def __post_init__(self) -> None:
        if self.alpha < 0 or self.beta < 0:
            raise ValueError(f"a link needs alpha >= 0 and beta >= 0 seconds, got {self.alpha} and {self.beta}")

    def seconds(self, nbytes: int, messages: int = 1) -> float:
        """Time of `messages` messages, one after another, that hold `nbytes` bytes together."""
        return messages * self.alpha + self.beta * nbytes
