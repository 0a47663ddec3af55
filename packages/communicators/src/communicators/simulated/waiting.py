"""Waits of the ranks of a simulated world: for the end of a call, or for a condition that signals bring about."""

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
"""Name of a call: its communicator, and its number there."""


class SimulatedCall:
    """A call in the loop: what its current round still lacks, and who waits for its end."""

    def __init__(self, call: Call, context: Context, began: float) -> None:
        self.call, self.context = call, context
        self.began, self.ended = began, began
        self.bytes_sent = 0
        self.done = False
        self.error: CollectiveError | None = None
        self.lacks: dict[int, tuple[int, int]] = {}  # peer -> tag, capacity
        self.unsent = -1  # -1: not in a round
        self.received: Received = {}
        self.waiter: Action | None = None
        self.callbacks: list[Action] = []

    def when_over(self, callback: Action) -> None:
        """Calls back at the end, or at once if the call is over."""
        if self.done:
            callback()
        else:
            self.callbacks.append(callback)

    @property
    def name(self) -> Name:
        """Communicator and number of the call."""
        return self.context, self.call.number

    def waits(self) -> str:
        """Phrase that says who waits for whom."""
        call = self.call
        return errors.waits(call.rank, call.number, call.facts, call.turn, list(self.lacks))


class Watch:
    """Rank that waits for a condition which signals of a communicator bring about."""

    def __init__(self, rank: int, context: Context, over: Callable[[], bool]) -> None:
        self.rank, self.context, self.over = rank, context, over
        self.done = False
        self.waiter: Action | None = None

    def waits(self) -> str:
        """Phrase that says who waits for what."""
        return f"rank {self.rank} waits for a signal"
