"""What training has sent, while something else is under way between the same ranks."""

from collections.abc import Callable
from typing import Any

import torch
from communicators import Communicator, Round, Schedule, Work
from thinwire_trainer.agreement import Aside, Meter


class Posting(Communicator):
    """Counts a call's bytes a moment after they were yielded, as a real one does in its engine's thread."""

    rank, size = 0, 2

    def run(self, schedule: Schedule[Any], **named: Any) -> Any:
        raise NotImplementedError

    def start(self, schedule: Schedule[Any], **named: Any) -> Work[Any]:
        action = next(schedule)
        assert isinstance(action, Round)
        nbytes = sum(payload.numel() for payload in action.sends.values())

        def post() -> None:
            self.bytes_sent += nbytes
            schedule.close()

        return Posted(post)

    def clock(self) -> float:
        return 0.0


class Posted(Work[None]):
    began, ended = 0.0, None

    def __init__(self, post: Callable[[], None]) -> None:
        self._post, self._done = post, False

    def wait(self, timeout: float | None = None) -> None:
        if not self._done:
            self._done = True
            self._post()

    def is_completed(self) -> bool:
        return self._done

    def get_future(self) -> torch.futures.Future[None]:
        raise NotImplementedError


def told() -> Schedule[None]:
    yield Round(sends={1: torch.zeros(24, dtype=torch.uint8)})


def test_what_is_just_being_sent_aside_is_no_byte_of_training() -> None:
    """Else an epoch's bytes_sent depends on when it ended, and a run that was killed has other metrics."""
    comm = Posting()
    aside = Aside(comm)
    meter, read = Meter(comm, aside, lambda: 0), []
    for _ in range(3):
        work = aside.start(told(), facts="whether to stop", timeout=1.0)
        comm.bytes_sent += 100  # a step's
        read.append(meter.read())
        work.wait()
    assert [*read, meter.read()] == [100, 100, 100, 0]
