"""How a run ends: by itself, by an error, by SIGTERM or SIGINT, or because the launcher has gone.

One message for what a user can mend, a traceback for what is our fault, never a hang. A rank that waits for the others
in a collective does not come back to Python, where signals are handled. So a thread looks for them and for the parent.
While the loop trains it is told of the first signal, and all ranks end at the same step, with a checkpoint
(`training.stopping`). Elsewhere, at a second signal, and where that takes too long, the process ends where it stands:
a run survives that at any moment (`records.checkpoint`).
"""

import math
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from thinwire_trainer.errors import AgreedError, RunError, Stopped
from thinwire_trainer.launching.placement import Placement


def exit_code(work: Callable[[], None], place: Placement, *, program: str) -> int:
    """Do the work and return 0, or say why it failed and return 1; a rank that fails alone ends the whole job.

    128 + the number of a signal that all ranks were stopped by.
    """
    from communicators import CollectiveError, leave  # brings torch

    try:
        work()
    except (AgreedError, CollectiveError) as error:  # all ranks have the same message
        if place.rank == 0:
            complain(program, error)
        if place.uses_mpi and leave():  # MPI's own end would wait for those that do not answer
            _abort(place)
        return 1
    except Stopped as stopped:  # on all ranks
        if place.rank == 0:
            complain(program, stopped)
        return 128 + stopped.number
    except RunError as error:
        complain(program, error)
    except SystemExit as error:  # a code of 0 would tell the launcher that all is well
        complain(program, f"sys.exit({error.code!r}) was called during the run, which ends itself: leave that out")
    except Exception:
        sys.stderr.write(traceback.format_exc())  # at once: mpiexec drops what it has not read when the job is aborted
    else:
        return 0
    _abort(place)
    return 1


def complain(program: str, error: Exception | str) -> None:
    """The message on standard error, in one line."""
    print(f"{program}: error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)


def _abort(place: Placement) -> None:
    """End the other ranks too, which would otherwise wait for this one; torchrun does so by itself."""
    if place.uses_mpi and place.size > 1:
        from mpi4py import MPI

        sys.stderr.flush()
        time.sleep(FORWARD_SECONDS)
        MPI.COMM_WORLD.Abort(1)


FORWARD_SECONDS = 0.5  # in which mpiexec passes on what was written, before an abort
SIGNALS = (signal.SIGTERM, signal.SIGINT)
PATIENCE = 20.0  # seconds that ranks have to agree and write; Slurm gives 30 before it kills
LOOK = 1.0  # seconds between looks at the parent
ECHO = 0.25  # seconds in which the same signal may come again: a shell's `timeout` signals a process, then its group
FIRST_WORD = 0.5  # seconds that rank 0 has to speak for all
SHOW_CURSOR = b"\x1b[?25h"  # which a progress bar hides


class StopRequest:
    """The signal that asks a run to end: `number`, 0 while there is none. Only noted where the run is to do it."""

    def __init__(self) -> None:
        self.number = 0
        self._came, self._deferred = 0.0, False

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """During the block a first signal is left to it, for a while."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = bool(self.number)  # what is under way is ended in peace

    def takes(self, number: int) -> bool:
        """Whether this signal is left to the run: the first one, and its echoes."""
        now = time.monotonic()
        if not self.number:
            self.number, self._came = number, now
        return self._deferred and number == self.number and now - self._came < ECHO


@contextmanager
def stoppable(place: Placement, *, program: str) -> Iterator[StopRequest]:
    """During the block the process ends promptly, with one line and 128 + the signal's number, when it is stopped.

    Also when its launcher ends. What the block does with the request comes first. In the main thread; in another one
    this does nothing.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    before = {number: signal.signal(number, _noted) for number in SIGNALS}
    watch = threading.Thread(target=_watch, args=(reader, place, program, request), name="stop watch", daemon=True)
    watch.start()
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup)
        os.close(writer)  # ends the watch
        watch.join()
        os.close(reader)


def _noted(number: int, frame: FrameType | None) -> None:
    """The interpreter has written the number to the pipe by now."""
    del number, frame


def _watch(reader: int, place: Placement, program: str, request: StopRequest) -> None:
    parent, end = os.getppid(), math.inf
    while True:
        wait = min(LOOK if place.watches else math.inf, max(end - time.monotonic(), 0.0))
        ready, _, _ = select.select([reader], [], [], wait if wait < math.inf else None)
        if ready:
            numbers = os.read(reader, 1)
            if not numbers:
                return
            if signal.getsignal(numbers[0]) is _noted:  # else it is another's, such as the starter of the workers
                if not request.takes(numbers[0]):
                    _stop(numbers[0], place, program)
                end = time.monotonic() + PATIENCE
        elif time.monotonic() > end:
            _stop(request.number, place, program)
        elif os.getppid() != parent:
            if place.rank == 0:
                _say(program, f"{place.launcher}, which started this run, has ended")
            os._exit(1)


def _stop(number: int, place: Placement, program: str) -> None:
    """One rank speaks for all. Another one waits for it, and speaks where the launcher leaves it alone until then."""
    name = signal.Signals(number).name
    if place.rank == 0:
        _say(program, f"stopped by {name}")
    elif place.uses_mpi:  # torchrun names the rank
        time.sleep(FIRST_WORD)
        _say(program, f"rank {place.rank} was stopped by {name}")
    os._exit(128 + number)


def _say(program: str, text: str) -> None:
    """Past Python's own files, which the main thread may be waiting for."""
    with suppress(OSError):
        if os.isatty(1) or "FORCE_COLOR" in os.environ:
            os.write(1, SHOW_CURSOR)
        os.write(2, f"{program}: error: {text}\n".encode())
