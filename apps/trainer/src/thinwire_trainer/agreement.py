"""Messages between ranks besides training's: what they agree on, counted apart.

Settings, failures of what each rank did for itself, and the step after which all stop when a signal has asked any of
them to.
"""

import json
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from typing import Any, TypeVar

import torch
from communicators import Communicator, Schedule, Work, allgather, schedules, start
from torch import Tensor

from thinwire_trainer.errors import GO_ON, AgreedError, RunError, told


def gather_texts(text: str, comm: Communicator) -> list[str]:
    """Every rank's text, in rank order. A newcomer to an elastic group gets its own: the others are training."""
    if comm.joining:
        return [text]
    content = text.encode(errors="backslashreplace") + b"\n"  # a buffer may not be empty
    encoded = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return [bytes(received.tolist()).decode()[:-1] for received in comm.atomic(lambda: allgather(encoded, comm))]


@contextmanager
def all_or_none(comm: Communicator, *, advice: str = GO_ON) -> Iterator[None]:
    """Run the block on every rank: either it succeeds on all, or all raise the reason of the lowest that failed.

    The block must not communicate. RunError and OSError count as failures; anything else is a fault in the
    program and goes its way. When it returns, every rank has finished its block. advice: see `told`.
    """
    reason = ""
    try:
        yield
    except (RunError, OSError) as error:
        reason = told(error, advice=advice)
    reasons = gather_texts(reason, comm)
    failed = [rank for rank, text in enumerate(reasons) if text]
    if failed:
        where = "" if len(failed) == len(reasons) else f" (on rank {', '.join(map(str, failed))} of {comm.size})"
        raise AgreedError(reasons[failed[0]] + where)


def require_same(flags: Mapping[str, object], comm: Communicator) -> None:
    """Raise AgreedError, naming the first rank and flag that differ from rank 0's, if ranks have other flags."""
    ours = [f"--{name.replace('_', '-')} {value}" for name, value in flags.items()]
    gathered = [text.splitlines() for text in gather_texts("\n".join(ours), comm)]
    for rank, theirs in enumerate(gathered):
        for here, there in zip(gathered[0], theirs, strict=True):
            if here != there:
                raise AgreedError(
                    f"rank 0 was started with {here}, rank {rank} with {there}: start all ranks with the same flags"
                )


def require_same_data(kept: Mapping[str, Any] | None, comm: Communicator) -> None:
    """Raise AgreedError, naming the first rank whose task keeps other things than rank 0's, if ranks have other data.

    kept: this rank's content of task.json; fingerprints of the data are in it.
    """
    ours = {
        name: sha256(json.dumps(value, sort_keys=True).encode()).hexdigest() for name, value in (kept or {}).items()
    }
    here, *others = map(json.loads, gather_texts(json.dumps(ours), comm))
    for rank, there in enumerate(others, 1):
        if other := [name for name in here | there if here.get(name) != there.get(name)]:
            raise AgreedError(
                f"rank {rank} has other data than rank 0 (other {', '.join(other).replace('_', ' ')}): give all ranks "
                f"the same"
            )


T = TypeVar("T")


class ControlCommunicator(Communicator):
    """The same ranks by the same communicator, for what is not training: metrics, checkpoints, agreements.

    Sums go by our own schedule, so that metrics have the same bits in every world.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm, self.elastic, self.joining = comm, comm.elastic, comm.joining
        self._timeout = comm.timeout
        self._over, self._started = 0, list[Work[Any]]()

    @property
    def rank(self) -> int:  # type: ignore[override]
        """This rank's place, which changes in an elastic group."""
        return self._comm.rank

    @property
    def size(self) -> int:  # type: ignore[override]
        """Number of ranks, which changes in an elastic group."""
        return self._comm.size

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Device of payloads."""
        return self._comm.device

    def atomic(self, exchange: Callable[[], T], undo: Callable[[], object] = lambda: None) -> T:
        """Result of an exchange that all survivors of a death take, or none (`Communicator.atomic`).

        A newcomer makes it by itself: the others are training.
        """
        return exchange() if self.joining else self._comm.atomic(exchange, undo)

    @property
    def bytes_sent(self) -> int:  # type: ignore[override]
        """Bytes of what was called through this object, exactly, whatever goes on in the background."""
        return self._over + sum(work.bytes_sent for work in self._started)

    def start(
        self, schedule: Schedule[T], *, facts: str, timeout: float, device: torch.device | None = None
    ) -> Work[T]:
        """Start a schedule (`communicators.start`)."""
        self._over += sum(work.bytes_sent for work in self._started if work.ended is not None)
        self._started = [work for work in self._started if work.ended is None]
        work = self._comm.start(schedule, facts=facts, timeout=timeout, device=device)
        self._started.append(work)
        return work

    def settle(self) -> None:
        """Waits for what was started, so that both sides have counted it: where it is just being sent, one has."""
        for work in self._started:
            if work.ended is None:  # else a rank may have died in it
                work.wait()

    def clock(self) -> float:
        """Seconds by the communicator's clock."""
        return self._comm.clock()

    def elapse(self, seconds: float) -> None:
        """Let virtual time pass (`Communicator.elapse`)."""
        self._comm.elapse(seconds)


class Meter:
    """Bytes that this rank sends for training: all that `comm` counts, but for `aside`."""

    def __init__(self, comm: Communicator, aside: ControlCommunicator) -> None:
        self._comm, self._aside = comm, aside
        self._read = self._total()

    def begin(self) -> None:
        """Forgets what was sent until now, such as the first broadcast."""
        self._aside.settle()
        self._read = self._total()

    def read(self) -> int:
        """Bytes since it was last read, or begun. For every rank to call, at the same step."""
        self._aside.settle()
        before, self._read = self._read, self._total()
        return self._read - before

    def _total(self) -> int:
        return self._comm.bytes_sent - self._aside.bytes_sent


BETWEEN, SELDOM = 1.0, 3  # seconds; where all ranks meet, so many times as long
LONGEST = 1 << 12  # steps; the rate of a run changes
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class AgreedStop:
    """The step after which all ranks stop, when a signal has asked any of them to.

    About once a second they add up who was asked, in the background: what was started at one such step is looked at by
    all ranks at the next one, and there they stop, or go on. So no step waits for the answer, and a signal takes two
    seconds. How many steps that is follows from the same sum, so that ranks agree on it, too.

    asked: the number of the signal that has asked this rank to stop, 0 if none has. first_step: taken already. meet:
    comes before the answer is waited for, a third as often, where a rank in a step waits for one that is ahead.
    """

    def __init__(
        self,
        comm: Communicator,
        asked: Callable[[], int],
        *,
        first_step: int,
        clock: Callable[[], float] = time.perf_counter,
        meet: Callable[[], None] | None = None,
    ) -> None:
        self._comm, self._asked, self._clock, self._meet = comm, asked, clock, meet
        self._sum: Work[Tensor] | None = None
        self._ahead = 1  # steps from one sum to the next
        self._last, self._next, self._began = first_step, first_step + 1, clock()

    def after(self, step: int) -> int:
        """The signal by which all ranks stop now, after so many steps, 0 to go on. To be called after every step."""
        if step < self._next:
            return 0
        number = self._decide()
        if not number:
            self._ask(step)
        return number

    def close(self) -> None:
        """Waits for what was asked last. To be called after the last step, on every rank."""
        if self._sum is not None:
            self._sum.wait()
            self._sum = None

    def _decide(self) -> int:
        if self._sum is None:
            return 0
        if self._meet is not None:
            self._meet()
        *asked, seconds = self._sum.wait().tolist()
        self._sum, between = None, BETWEEN * (SELDOM if self._meet else 1)
        steps = self._comm.size * between / seconds if seconds > 0 else LONGEST
        self._ahead = int(min(max(steps, 1), LONGEST))
        return next((int(number) for number, ranks in zip(SIGNALS, asked, strict=True) if ranks), 0)

    def _ask(self, step: int) -> None:
        now, number = self._clock(), self._asked()
        seconds = (now - self._began) / (step - self._last)
        told = torch.tensor([*(float(number == one) for one in SIGNALS), seconds], dtype=torch.float64)
        schedule = schedules.allreduce(told, self._comm.rank, self._comm.size)
        self._sum = start(schedule, self._comm, facts="whether to stop", device=told.device)
        self._last, self._began, self._next = step, now, step + self._ahead
