"""The one background engine of a process: drives what was started, listens on control channels, says goodbye at exit.

The only process-wide object of the package. Where a transport may not be driven by another thread (MPI without
THREAD_MULTIPLE), the same work is done inside our calls only.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch

from communicators import errors
from communicators.streams import devices_of

if TYPE_CHECKING:
    from communicators.flight import TransportFlight
    from communicators.leftover import Leftover
    from communicators.transport_communicator import TransportCommunicator

LISTEN_SECONDS = 0.05
BUSY_SECONDS = 50e-6
SPIN_SECONDS = 100e-6
LONGEST_NAP_SECONDS = 200e-6
IDLE_SECONDS = 1e-3
FAILED_GOODBYE_SECONDS = 5.0
"""So long the end of a process waits for the peers of a communicator that has failed."""
FAIL_SECONDS = 10.0
"""A call under way on a communicator that has failed ends much sooner."""

logger = logging.getLogger(__name__)


@cache
def engine() -> Engine:
    """The engine of this process, made at its first use."""
    made = Engine()
    atexit.register(made.close)
    return made


class Engine:
    """Flights in the background, the last messages of calls that are over, and communicators whose letters are read."""

    def __init__(self) -> None:
        self._flights: list[TransportFlight] = []
        self._unsent: list[Leftover] = []
        self._comms: weakref.WeakSet[TransportCommunicator] = weakref.WeakSet()
        self._lock = threading.Lock()  # of the set, which grows in one thread while another walks it
        self._wake = threading.Event()
        self._closing = False
        self._process = os.getpid()
        self._inline = False
        self._listened = 0.0
        self._thread: threading.Thread | None = None

    def watch(self, comm: TransportCommunicator) -> None:
        """From now on this communicator's letters are read."""
        with self._lock:
            self._comms.add(comm)
        if not comm.transport.threaded:
            if not self._inline:
                logger.warning("this MPI was not initialised with THREAD_MULTIPLE: progress only inside our calls")
            self._inline = True
        elif self._thread is None and not self._inline:
            self._thread = threading.Thread(target=self._live, name="communicators-engine", daemon=True)
            self._thread.start()

    def forget(self, comm: TransportCommunicator) -> None:
        """This communicator is closed; RuntimeError while calls of it are under way that have not failed."""
        for flight in [flight for flight in list(self._flights) if flight.comm is comm]:
            failing = comm.control.verdict is not None
            if not self.wait(flight, FAIL_SECONDS if failing else 0.0) and not failing:
                raise RuntimeError("close() while calls that were started are under way: wait() for them first")
        self._drain(comm)
        with self._lock:
            self._comms.discard(comm)

    def add(self, flight: TransportFlight) -> None:
        """Drives a flight in the background."""
        self._flights.append(flight)
        self._wake.set()

    def see_through(self, leftover: Leftover) -> bool:
        """Sees that messages come which a call has left behind; False where no thread would."""
        if leftover.over():
            return True
        if self._inline or self._closing:
            return False
        self._unsent.append(leftover)
        self._wake.set()
        return True

    def drive(self, flight: TransportFlight) -> None:
        """Polls a flight to its end in the calling thread.

        Busy at first in every round, then with naps in proportion to the wait: ranks beyond the cores would otherwise
        spin in the way of the one that they wait for.
        """
        try:
            while not flight.poll():
                waited = time.monotonic() - flight.progressed
                if self._inline:  # what was started before has no other thread
                    self._poll_all()
                if waited > SPIN_SECONDS:
                    flight.comm.transport.nap(min(waited / 8, LONGEST_NAP_SECONDS))
                    self._look_around([flight])
        except BaseException as error:
            flight.interrupted(error)
            raise

    def wait(self, flight: TransportFlight, timeout: float | None) -> bool:
        """Waits for a flight that was added; False when it is not over in time."""
        if not self._inline:
            return flight.finished.wait(timeout)
        end = None if timeout is None else time.monotonic() + timeout
        self._poll_all()
        while not flight.finished.is_set() and (end is None or time.monotonic() < end):
            time.sleep(BUSY_SECONDS)
            self._poll_all()
        return flight.finished.is_set()

    def future(self, flight: TransportFlight) -> torch.futures.Future[Any]:
        """A future of the flight's result. Without a thread nothing would complete it later, so it is waited for."""
        if self._inline:
            self.wait(flight, None)
        done: torch.futures.Future[None] = torch.futures.Future(devices=devices_of(flight.device))
        flight.when_finished(lambda: done.set_result(None))
        return done.then(lambda _: flight.result())  # an error raised here surfaces as itself; set_exception's does not

    def close(self) -> None:
        """At exit: tells all peers, and reads their letters until they have left too. Not in a forked child."""
        if os.getpid() != self._process or self._closing:
            return
        raised = getattr(sys, "last_value", None)
        self.leave("it exited" if raised is None else errors.describe(raised), None)

    def leave(self, why: str, timeout: float | None) -> list[int]:
        """Ends everything under way and parts from all peers: see `part`."""
        self._closing = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
        for flight in self._flights:
            flight.abandon()
        for comm in self._watched():
            self._drain(comm)
        return part(self._watched(), why, timeout)

    def _live(self) -> None:
        while not self._closing:
            if self._flights or self._unsent:
                self._poll_all()
                time.sleep(self._nap())
            else:
                self._look_around([])
                self._wake.wait(LISTEN_SECONDS)
                self._wake.clear()

    def _nap(self) -> float:
        """In proportion to how long nothing has come: each look takes time from the threads that compute."""
        last = max((flight.progressed for flight in list(self._flights)), default=0.0)
        last = max([last, *(leftover.since for leftover in list(self._unsent))])
        return min(max((time.monotonic() - last) / 8, BUSY_SECONDS), IDLE_SECONDS)

    def _poll_all(self) -> None:
        flights = list(self._flights)
        for flight in flights:
            if flight.poll():
                self._flights.remove(flight)
        self._poll_unsent()
        self._look_around(flights)

    def _drain(self, comm: TransportCommunicator) -> None:
        """Until the last messages of this communicator's calls have come, or never will."""
        while any(leftover.comm is comm for leftover in list(self._unsent)):
            if self._closing:  # the thread has ended
                self._poll_unsent()
                _guarded(comm, comm.listen)
            time.sleep(BUSY_SECONDS)

    def _poll_unsent(self) -> None:
        for leftover in list(self._unsent):
            if leftover.over():
                self._unsent.remove(leftover)

    def _look_around(self, flights: list[TransportFlight]) -> None:
        """At most every LISTEN_SECONDS, a hundredth of the shortest watch: reads letters, looks at the clock."""
        now = time.monotonic()
        for flight in flights:
            _guarded(flight.comm, flight.watch)
        if now - self._listened < LISTEN_SECONDS or not (self._inline or self._on_thread()):
            return
        self._listened = now
        for comm in self._watched():
            _guarded(comm, comm.listen)

    def _watched(self) -> list[TransportCommunicator]:
        with self._lock:
            return list(self._comms)

    def _on_thread(self) -> bool:
        return threading.current_thread() is self._thread


def leave(*, timeout: float = FAILED_GOODBYE_SECONDS) -> list[int]:
    """Says goodbye to all peers of this process's communicators; returns the ranks that did not in `timeout` seconds.

    For the end of a program that has failed. Nothing can be called over them afterwards. Under MPI the end of a process
    waits in MPI_Finalize for all others, also for those that cannot be reached: where ranks are missing,
    MPI.COMM_WORLD.Abort(1) is the way out.
    """
    return engine().leave("it ended after an error", timeout)


def part(comms: Sequence[TransportCommunicator], why: str, timeout: float | None = None) -> list[int]:
    """Says goodbye on all of them, then goes on reading letters until all peers have said so: an arbiter may still
    be needed. Returns the ranks that have not after `timeout` seconds, default what each transport says, and at most
    FAILED_GOODBYE_SECONDS where a communicator has failed: who does not answer then may never do so."""
    for comm in comms:
        _guarded(comm, partial(comm.leave, why))
    begin = time.monotonic()
    staying = list(comms)
    while staying:
        staying = [comm for comm in staying if _guarded(comm, comm.listen)]
        waited = time.monotonic() - begin
        limits = [_goodbye_seconds(comm) if timeout is None else timeout for comm in staying]
        staying = [comm for comm, limit in zip(staying, limits, strict=True) if waited < limit and comm.staying()]
        time.sleep(0.005 if staying else 0.0)
    missing = sorted(
        {rank for comm in comms for rank in range(comm.size) if rank not in {comm.rank, *comm.control.gone}}
    )
    for comm in comms:
        _guarded(comm, comm.release)
    return sorted(missing)


def _goodbye_seconds(comm: TransportCommunicator) -> float:
    usual = comm.transport.goodbye_seconds
    return usual if comm.control.verdict is None else min(usual, FAILED_GOODBYE_SECONDS)


def _guarded(comm: TransportCommunicator, look: Callable[[], None]) -> bool:
    """An error of the transport itself (False) becomes the reason of its communicator; the others' engine goes on."""
    try:
        look()
        return True
    except Exception as error:
        comm.control.verdict = comm.control.verdict or f"rank {comm.rank}'s transport failed: {errors.describe(error)}"
        return False
