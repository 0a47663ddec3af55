"""What the ranks of a simulated world wait for: the end of a call, or what signals bring about."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from communicators import errors
from communicators.background.call import Call
from communicators.errors import CollectiveError
from communicators.schedule import Received
from communicators.simulated.signals_in_flight import Context

Action: TypeAlias = Callable[[], None]
Name: TypeAlias = tuple[Context, int]
"""A call: of which communicator, its number there."""


class SimulatedCall:
    """A call in the loop: what its current round still lacks, and who waits for its end."""

    def __init__(self, call: Call, context: Context, began: float) -> None:
        self.call, self.context = call, context
        self.began, self.ended = began, began
        self.done = False
        self.error: CollectiveError | None = None
        self.lacks: dict[int, tuple[int, int]] = {}  # peer -> tag, capacity
        self.unsent = -1  # -1: not in a round
        self.received: Received = {}
        self.waiter: Action | None = None
        self.callbacks: list[Action] = []

    def when_over(self, callback: Action) -> None:
        """Calls back at the end, or now if that has been."""
        if self.done:
            callback()
        else:
            self.callbacks.append(callback)

    @property
    def name(self) -> Name:
        """Which call of which communicator."""
        return self.context, self.call.number

    def waits(self) -> str:
        """Who waits for whom."""
        call = self.call
        return errors.waits(call.rank, call.number, call.facts, call.turn, list(self.lacks))


class Watch:
    """A rank that waits until something holds which signals of a communicator bring about."""

    def __init__(self, rank: int, context: Context, over: Callable[[], bool]) -> None:
        self.rank, self.context, self.over = rank, context, over
        self.done = False
        self.waiter: Action | None = None

    def waits(self) -> str:
        """Who waits for what."""
        return f"rank {self.rank} waits for a signal"
