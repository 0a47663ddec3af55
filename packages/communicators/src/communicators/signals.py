"""Signals: single integers from any rank to any other, at any time, bound to no call and no round.

A partial collective says by them that "round 7 has begun", and whatever else may happen on one rank only. They come at
least once; one that is sent again while it is on its way, or waits to be polled, may come once for both. So their
meaning must bear being heard twice, or late.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeAlias

from communicators.errors import CollectiveError
from communicators.schedule import Schedule

OnSignal: TypeAlias = Callable[[int, int], None]
"""Callback for a signal, with its source and value."""


class Attempt(ABC):
    """A schedule among some of the ranks, beside others that may have died; made by `Signals.attempt`.

    Attributes:
        value: Result that the schedule has returned.
        error: Error of the attempt, on this rank alone; None while it has not failed.
        lost: Rank whose lost connection made the attempt fail.
        peers: Ranks with which it exchanges messages in its current round, as `Work.peers`.
    """

    value: Any
    error: CollectiveError | None
    lost: int | None
    peers: Collection[int]

    @abstractmethod
    def when_over(self, callback: Callable[[], None]) -> None:
        """Calls back once there is a value or an error, at once if it is over; in any thread, so it must be short."""

    @abstractmethod
    def cancel(self) -> None:
        """Leaves the attempt, on this rank alone: its error says so, unless it is over. Does not block."""


MOST_WAITING = 1024
"""Most different signals from one rank to one other that the other has not taken; `send` raises beyond."""
VALUES = range(-(1 << 63), 1 << 63)


class Signals(ABC):
    """Signals of one rank; made by `Communicator.signals`. Its methods may be called in any thread.

    Between two ranks they come in the order in which they were sent; among others, and relative to calls, in any.
    """

    def __init__(self, rank: int, size: int, on_signal: OnSignal | None) -> None:
        self.rank, self.size, self._on_signal = rank, size, on_signal
        self._unread: dict[tuple[int, int], None] = {}  # an ordered set of what has come
        self._closed = False

    def send(self, peer: int, value: int) -> None:
        """Sends an integer to one rank, which may be this one; does not wait for it.

        Args:
            peer: Rank to signal; one that has departed gets nothing.
            value: 64 bits, with a sign.

        Raises:
            RuntimeError: The peer has not taken MOST_WAITING others.
            CollectiveError: The signals are closed, or have failed.
        """
        if isinstance(peer, bool) or not isinstance(peer, int) or not 0 <= peer < self.size:
            raise ValueError(f"cannot signal rank {peer!r} of {self.size}; expected 0 … {self.size - 1}")
        self._send([peer], _checked(value))

    def send_all(self, value: int) -> None:
        """Sends an integer to all other ranks; see `send`."""
        self._send([peer for peer in range(self.size) if peer != self.rank], _checked(value))

    def poll(self) -> list[tuple[int, int]]:
        """The signals that have come since the last time, as (source, value); does not wait.

        After `close()` it gives what was left.

        Raises:
            CollectiveError: The signals have failed.
        """
        if self._on_signal is not None:
            raise RuntimeError("these signals go to on_signal: poll() is for those that were made without it")
        return self._take()

    @abstractmethod
    def wait_until(self, over: Callable[[], bool], timeout: float) -> None:
        """Waits until a condition holds that signals bring about.

        Args:
            over: Whether it holds: asked now, after every signal that `on_signal` has dealt with, and now and then
                besides; short, and in any thread.
            timeout: Seconds.

        Raises:
            TimeoutError: The condition does not hold by then.
            CollectiveError: The signals have failed.
        """

    @abstractmethod
    def remind(self, seconds: float, value: int) -> None:
        """Sends a signal to this rank itself after `seconds`."""

    @abstractmethod
    def fail(self, reason: str) -> None:
        """Fails the signals on all ranks, and returns once that is agreed on: a rank that leaves then has been heard.

        All ranks give one reason, the first that was found on any rank. What `on_signal` raises is such a reason too.
        """

    @abstractmethod
    def check(self) -> None:
        """Does nothing while the signals work.

        Raises:
            CollectiveError: The signals have failed.
        """

    def attempt(self, schedule: Schedule[Any], members: Sequence[int], *, facts: str) -> Attempt:
        """Starts a schedule among some ranks, which count from 0 in it.

        It waits without end, for slow ranks too; where a rank has died that it waits for, `departed` says so, and each
        member leaves it by itself. Only where `Communicator.outlives_ranks`.

        Args:
            schedule: This rank's schedule.
            members: The ranks, in the order that the schedule numbers them.
            facts: Text that tells it from all other attempts, alike on its members.
        """
        del schedule, members, facts
        raise NotImplementedError(f"{type(self).__name__} does not outlive its ranks")

    def leave(self, why: str) -> None:
        """Departs from the others, which go on without this rank. Nothing comes or goes any more."""
        del why
        raise NotImplementedError(f"{type(self).__name__} cannot be left: close() them on all ranks")

    @property
    @abstractmethod
    def departed(self) -> frozenset[int]:
        """The ranks that have closed, left or died, as far as this rank knows."""

    @abstractmethod
    def close(self) -> None:
        """Ends the signals on all ranks; collective. Those sent before have come when it returns: `poll` has them.

        Ranks that have departed are not waited for.

        Raises:
            TimeoutError: Names the ranks that do not close within the communicator's `timeout`.
        """

    @abstractmethod
    def _send(self, peers: Sequence[int], value: int) -> None: ...

    def _take(self) -> list[tuple[int, int]]:
        if not self._unread:
            self.check()
        taken, self._unread = list(self._unread), {}
        return taken

    def _refuse_if_closed(self) -> None:
        self.check()
        if self._closed:
            raise CollectiveError("these signals are closed")


def refuse_too_many_waiting(peer: int, waiting: int) -> None:
    """Raises RuntimeError where so many signals wait already: a peer that takes none would cost memory without end."""
    if waiting >= MOST_WAITING:
        raise RuntimeError(
            f"rank {peer} has not taken {waiting} signals: it must poll() them, or be given on_signal; "
            "and what several signals say might be said by the last one"
        )


def _checked(value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not VALUES.start <= value < VALUES.stop:
        raise ValueError(f"a signal is a whole number of 64 bits, got {value!r}")
    return value
