"""The signals that are on their way in a simulated world, and who gets them."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeAlias

Context: TypeAlias = tuple[int, ...]
"""A communicator of the world: () the first one, (2, 0) the first duplicate of its third duplicate."""
Listener: TypeAlias = Callable[[int, int], bool]
"""Takes source and value; says whether the signal waits now until it is polled."""

SIGNAL_BYTES = 8


class Events(Protocol):
    """Event loop that carries the signals."""

    def wish(self, action: Callable[[], None]) -> None:
        """Has the loop's thread do this, soon and at the same virtual time."""

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Has the loop's thread do this after `seconds`."""

    def guarded(self, context: Context, rank: int, deliver: Callable[[], None]) -> None:
        """Delivers to a rank; an error of its listener fails the communicator."""

    def seconds_for(self, nbytes: int) -> float:
        """Seconds that a message takes."""

    def is_dead(self, rank: int) -> bool:
        """Whether a rank has died: it hears nothing."""


class SignalsInFlight:
    """Signals on their way; between two ranks the first that was sent is the first to come, whatever the jitter."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._listeners: dict[tuple[Context, int], Listener] = {}
        self._early: defaultdict[tuple[Context, int], list[tuple[int, int]]] = defaultdict(list)
        self._sent: defaultdict[tuple[Context, int, int], deque[int]] = defaultdict(deque)
        self._left: set[tuple[Context, int]] = set()
        self._closing: set[tuple[Context, int]] = set()
        self._waiting: Counter[tuple[Context, int, int]] = Counter()

    def listen(self, context: Context, rank: int, listener: Listener) -> None:
        """Gives the rank's signals to the listener from now on, and first those that came before."""
        self._listeners[context, rank] = listener
        self._events.wish(lambda: self._events.guarded(context, rank, lambda: self._hear_early(context, rank)))

    def send(self, context: Context, source: int, target: int, value: int) -> None:
        """Sends a signal, which takes the time of a message of SIGNAL_BYTES, or none to the rank itself.

        A signal that is on its way is not sent again.
        """
        name = context, source, target
        if value in self._sent[name]:
            return
        self._sent[name].append(value)
        self._waiting[name] += 1

        def wish() -> None:
            seconds = 0.0 if source == target else self._events.seconds_for(SIGNAL_BYTES)
            arrive = partial(self._arrive, context, source, target)
            self._events.after(seconds, lambda: self._events.guarded(context, target, arrive))

        self._events.wish(wish)

    def leave(self, context: Context, rank: int) -> None:
        """Ends the signals of a rank: it hears nothing more, and the others know."""
        self._left.add((context, rank))

    def left(self, context: Context) -> frozenset[int]:
        """Ranks that have left."""
        return frozenset(rank for at, rank in self._left if at == context)

    def close(self, context: Context, rank: int) -> None:
        """Notes that a rank sends no more."""
        self._closing.add((context, rank))

    def closing(self, context: Context, rank: int) -> bool:
        """Whether a rank has said that it sends no more."""
        return (context, rank) in self._closing

    def on_their_way(self, context: Context, target: int) -> bool:
        """Whether any signals are on their way to this rank."""
        return any(sent for (at, _, to), sent in self._sent.items() if (at, to) == (context, target))

    def waiting(self, context: Context, source: int, target: int) -> int:
        """Number of signals between two ranks that are in flight, or have come and were not polled."""
        return self._waiting[context, source, target]

    def polled(self, context: Context, source: int, target: int) -> None:
        """Notes that a signal between two ranks was polled."""
        self._waiting[context, source, target] -= 1

    def _arrive(self, context: Context, source: int, target: int) -> None:
        value = self._sent[context, source, target].popleft()
        if self._events.is_dead(target) or (context, target) in self._left:
            self.polled(context, source, target)
            return
        if (context, target) in self._listeners:
            self._hear(context, source, target, value)
        else:
            self._early[context, target].append((source, value))

    def _hear_early(self, context: Context, rank: int) -> None:
        for source, value in self._early.pop((context, rank), []):
            self._hear(context, source, rank, value)

    def _hear(self, context: Context, source: int, target: int, value: int) -> None:
        if not self._listeners[context, target](source, value):
            self.polled(context, source, target)
