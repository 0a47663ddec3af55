"""Interface of every world: ranks that carry schedules, at once (`run`) or in the background (`start`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from types import GeneratorType, MappingProxyType
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from communicators.errors import CollectiveError
from communicators.schedule import Schedule
from communicators.signals import OnSignal, Signals

T = TypeVar("T")

TIMEOUT_SECONDS = 300.0
"""Longest wait of a rank for a late peer before the collective fails on all of them."""
MOST_CONNECTIONS = 64


MOST_DUPLICATES = 64
"""Most open duplicates of one communicator: MPI has about 2,000 communicators in all."""


def refuse_too_many(duplicates: int) -> None:
    """Raises RuntimeError where a communicator has as many open duplicates as it may."""
    if duplicates >= MOST_DUPLICATES:
        raise RuntimeError(f"{MOST_DUPLICATES} duplicates of this communicator are open: close() some, on every rank")


def check_timeout(timeout: float) -> float:
    """The seconds given; TypeError or ValueError unless they are a number above 0."""
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise TypeError(f"timeout is {timeout!r}, expected seconds as a number above 0")
    if not timeout > 0:
        raise ValueError(f"timeout is {timeout} s, expected more than 0: it is how long a late rank is waited for")
    return float(timeout)


def check_connections(connections: int) -> int:
    """The number given; ValueError unless it is a whole one from 1 to `MOST_CONNECTIONS`."""
    if isinstance(connections, bool) or not isinstance(connections, int) or not 1 <= connections <= MOST_CONNECTIONS:
        raise ValueError(
            f"connections is {connections!r}, expected a whole number of TCP connections to each peer, 1 to "
            f"{MOST_CONNECTIONS}"
        )
    return connections


class Work(ABC, Generic[T]):
    """A collective that was started and goes on by itself.

    Attributes:
        began: Start of the call, in seconds by `Communicator.clock`.
        ended: Time of its result or error, by the same clock; None until then.
        bytes_sent: Bytes that this rank has sent in it so far, as `Communicator.bytes_sent` counts them.
        error: Error that `wait` would raise; None while the collective has not failed.
        peers: Ranks with which it exchanges messages in its current round, some twice; of the last one at its end.
    """

    began: float
    ended: float | None
    bytes_sent: int
    error: CollectiveError | None
    peers: Collection[int] = ()

    @abstractmethod
    def wait(self, timeout: float | None = None) -> T:
        """Waits for the result, and returns it.

        Args:
            timeout: Seconds; without it for ever.

        Raises:
            TimeoutError: The result is not there in time; the collective goes on.
            CollectiveError: The collective failed.
        """

    @abstractmethod
    def is_completed(self) -> bool:
        """Whether `wait` would return, or raise, at once."""

    def when_over(self, callback: Callable[[], None]) -> None:
        """Calls back once there is a result or an error, at once if it is over; in any thread, so it must be short."""
        raise NotImplementedError(f"{type(self).__name__} calls nobody back: wait() for it")

    @abstractmethod
    def get_future(self, *beside: Work[Any]) -> torch.futures.Future[T]:
        """A torch future of the result. Errors surface through `wait` of this work, and of futures by `then`.

        Args:
            beside: Other works of this communicator. The future is over when all are, with the result of this one.
        """


class Communicator(ABC):
    """A group of ranks that makes the same calls in the same order.

    Attributes:
        rank: This process's number, from 0.
        size: Number of ranks.
        device: Device of payloads unless a call names another one.
        bytes_sent: Bytes that this rank sent in counted rounds so far, by duplicates too.
        messages_sent: Messages that held those bytes.
        awaited: Seconds for which calls of this rank lacked messages of each peer, which has a number in the present
            group; of peers side by side each counts.
        outlives_ranks: Whether its signals, and attempts by them, go on where a rank has died. Its calls never do.
        hasty: Whether a rank that is lost, or does not answer, is gone at once: the others meet again in another group.
        elastic: Whether its ranks may change, in `atomic` and `Elastic.boundary` alone.
        generation: Number of the group, which grows whenever the ranks of an elastic one change.
        joining: Whether this rank has come to a running training, whose state is here, and was not taken over yet.
        newcomer: Whether it has come to a running training whose state is here, or still under way.
        leaving: Whether it leaves an elastic group after the step under way.
        failure: Reason for which all its calls fail, None while they do not.
        ended: Ranks that have left, or whose connections are closed, as far as this one knows.
    """

    rank: int
    size: int
    device: torch.device = torch.device("cpu")
    bytes_sent: int = 0
    messages_sent: int = 0
    awaited: Mapping[int, float] = MappingProxyType({})
    outlives_ranks: bool = False
    hasty: bool = False
    elastic: bool = False
    generation: int = 1
    joining: bool = False
    newcomer: bool = False
    leaving: bool = False
    failure: str | None = None
    ended: Collection[int] = ()
    _timeout = TIMEOUT_SECONDS

    @property
    def first_size(self) -> int:
        """Number of ranks of the first group that this one was in: the same on all that began together."""
        return self.size

    @property
    def timeout(self) -> float:
        """Seconds that a call waits for a late rank unless it says otherwise; may be set, alike on all ranks."""
        return self._timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self._timeout = check_timeout(seconds)

    def run(self, schedule: Schedule[T], *, facts: str, timeout: float, device: torch.device | None = None) -> T:
        """Carries a schedule to its end and returns its result; the function `run` checks the arguments and calls it.

        Args:
            schedule: What this rank sends and receives, round by round.
            facts: What all ranks must share, as text.
            timeout: Seconds that a round waits at most.
            device: Where received payloads are put, default the communicator's.
        """
        return self.start(schedule, facts=facts, timeout=timeout, device=device).wait()

    @abstractmethod
    def start(
        self, schedule: Schedule[T], *, facts: str, timeout: float, device: torch.device | None = None
    ) -> Work[T]:
        """Starts a schedule in the background; the function `start` checks the arguments and calls it.

        Args:
            schedule: What this rank sends and receives, round by round.
            facts: What all ranks must share, as text.
            timeout: Seconds that a round waits at most.
            device: Where received payloads are put, default the communicator's.
        """

    def duplicate(self) -> Communicator:
        """Another communicator of the same ranks, with calls, numbers, tags and errors of its own. Collective.

        A library that shares ranks with its user makes one: their calls may then come in any order to each other.
        `close()` frees it.

        Raises:
            RuntimeError: This communicator has MOST_DUPLICATES that are not closed.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot be duplicated")

    def signals(self, on_signal: OnSignal | None = None) -> Signals:
        """Single integers from any rank to any other at any time; see `Signals`. Collective, as `duplicate()` is.

        They are a duplicate of this communicator, counted as one: it may fail without them, and `close()` frees them.

        Args:
            on_signal: Called with (source, value) for each signal that comes, by the background engine's thread within
                a millisecond: it must be short, and wait for nothing. What it raises fails the signals on all ranks.
                Without it signals wait for `poll()`.

        Raises:
            RuntimeError: No thread may read them (MPI without THREAD_MULTIPLE).
        """
        del on_signal
        raise NotImplementedError(f"{type(self).__name__} has no signals")

    def atomic(self, exchange: Callable[[], T], undo: Callable[[], object] = lambda: None) -> T:
        """Result of an exchange; an `Elastic` has all survivors of a death take it, or none, and does it again.

        Args:
            exchange: Makes collective calls over this communicator, on all ranks alike.
            undo: Takes back what `exchange` has changed.
        """
        del undo
        return exchange()

    def boundary(self, give: Callable[[], Mapping[str, Any]]) -> bool:
        """Lets ranks of an `Elastic` come and go between two steps; returns whether the group has changed."""
        del give
        return False

    def claim(self, owner: Any, *, anew: bool = False) -> None:  # noqa: B027
        """Notes whose state newcomers to an `Elastic` get.

        Args:
            owner: The optimizer, whose `admit` is called, too, when the next batch is dealt.
            anew: Whether it takes the place of an earlier one.

        Raises:
            ValueError: It is the state of another one, made later.
        """

    def serve(self, give: Callable[[], Mapping[str, Any]]) -> None:  # noqa: B027 - most have no newcomers
        """Gives newcomers to an `Elastic` their state, where others have let them in."""

    def catch_up(self) -> None:  # noqa: B027
        """Goes on in the next generation of an `Elastic`, if others have begun one while this rank computed."""

    def take(self) -> Mapping[str, Any] | None:
        """State that another rank of an `Elastic` has given to this one, which is `joining`; once. Waits for it.

        Returns:
            The state; None where it does not come: leave what was opened with the others, and `join_anew`.
        """
        raise RuntimeError("this rank is not joining others")

    def join_anew(self) -> None:
        """Comes into another generation of an `Elastic`, whose state is under way to this rank then."""
        raise RuntimeError("this rank is not joining others")

    def aside(self, schedule: Schedule[T], members: Sequence[int], *, facts: str) -> Work[T]:
        """Starts a schedule among some ranks, in which they count from 0; it fails on its own, and blocks no other.

        Args:
            schedule: Read once.
            members: Those ranks; each of them calls it.
            facts: Its name, which no other one has.
        """
        del schedule, members, facts
        raise NotImplementedError(f"{type(self).__name__} has no calls among some ranks")

    def retire(self) -> None:  # noqa: B027 - most worlds hold nothing
        """Closes it as soon as what was sent has gone, and waits for nobody."""

    def board(self, name: str) -> Any:
        """Board on which an `Elastic` of that name meets others, in a world that has one."""
        del name
        raise TypeError(f"{type(self).__name__} has no board: the ranks of its world cannot change")

    @abstractmethod
    def clock(self) -> float:
        """Seconds, monotonic: virtual in a simulated world, real elsewhere."""

    def elapse(self, seconds: float) -> None:
        """Advances the clock of a simulated world by this rank's computation; a real clock has advanced by itself."""
        del seconds

    def close(self) -> None:  # noqa: B027 - most worlds hold nothing
        """Releases what a transport holds; collective, after the last call. Later calls over it are errors.

        Only programs that make many groups need it, before they free the group: at exit everything is released anyway.

        Raises:
            RuntimeError: A started call of this rank is in flight.
            TimeoutError: Another rank does not close it in time.
        """

    def native_allreduce(self, tensor: Tensor, *, facts: str) -> Tensor | None:
        """The transport's own sum over ranks, out of place; None where it has none for this tensor.

        Args:
            tensor: This rank's summand.
            facts: What all ranks must share, as text.
        """
        del tensor, facts
        return None


def _settings(schedule: Schedule[T], facts: str | None, timeout: float | None, comm: Communicator) -> dict[str, Any]:
    """Checked settings of a call; facts default to the name of the schedule's function."""
    if not isinstance(schedule, GeneratorType | Generator):  # the first is told at once, the second asks Python code
        raise TypeError(
            f"the schedule is {type(schedule).__name__}, expected a generator: what a function with "
            "`yield Round(...)` in it returns when it is called"
        )
    if isinstance(schedule, GeneratorType) and (schedule.gi_frame is None or schedule.gi_suspended):
        raise ValueError(
            f"this {schedule.__qualname__} has run before, and a generator runs once: call its function again"
        )
    if not isinstance(comm, Communicator):
        raise TypeError(f"comm is {type(comm).__name__}, expected a Communicator: make it by as_communicator(comm)")
    waits = comm.timeout if timeout is None else check_timeout(timeout)
    return {"facts": facts or str(getattr(schedule, "__qualname__", type(schedule).__name__)), "timeout": waits}


def run(
    schedule: Schedule[T],
    comm: Communicator,
    *,
    facts: str | None = None,
    timeout: float | None = None,
    device: torch.device | None = None,
) -> T:
    """Carries a schedule to its end and returns its result.

    Args:
        schedule: What this rank sends and receives, round by round.
        comm: The ranks; all of them call.
        facts: What all ranks must share, as text; without it the schedule's name.
        timeout: Seconds that a round waits at most; default `comm.timeout`.
        device: Where received payloads are put, default the communicator's.

    Raises:
        TypeError: The schedule is no generator, or `comm` no Communicator.
        ValueError: The schedule has run before, or the time-out is not above 0.
        CollectiveError: A rank calls with other facts, has failed, or kept a round waiting for too long: the same
            reason on every rank.
    """
    settings = _settings(schedule, facts, timeout, comm)
    try:
        return comm.run(schedule, device=device, **settings)
    except BaseException:
        schedule.close()  # one that another wraps was perhaps not begun, and then is not closed with that
        raise


def start(
    schedule: Schedule[T],
    comm: Communicator,
    *,
    facts: str | None = None,
    timeout: float | None = None,
    device: torch.device | None = None,
) -> Work[T]:
    """Like `run`, but goes on in the background while the caller computes.

    All ranks start their calls in the same order; they may complete in any.

    Args:
        schedule: What this rank sends and receives, round by round.
        comm: The ranks; all of them call.
        facts: What all ranks must share, as text; without it the schedule's name.
        timeout: Seconds that a round waits at most; default `comm.timeout`.
        device: Where received payloads are put, default the communicator's.

    Raises:
        TypeError: As `run`.
        ValueError: As `run`.
        CollectiveError: The communicator has failed already; later failures are raised by `Work.wait`.
    """
    settings = _settings(schedule, facts, timeout, comm)
    return comm.start(schedule, device=device, **settings)
