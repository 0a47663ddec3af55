"""What training has sent, while something else is under way between the same ranks."""

from collections.abc import Callable
from typing import Any

import torch
from communicators import Communicator, Payload, Round, Schedule, Work
from thinwire_trainer.agreement import ControlCommunicator, Meter


class Posting(Communicator):
    """Counts a call's bytes a moment after they were yielded, as a real one does in its engine's thread."""

    rank, size = 0, 2

    def run(self, schedule: Schedule[Any], **named: Any) -> Any:
        raise NotImplementedError

    def start(self, schedule: Schedule[Any], **named: Any) -> Work[Any]:
        action = next(schedule)
        assert isinstance(action, Round)
        nbytes = sum(payload.wire_nbytes for payload in action.sends.values())

        def post() -> int:
            self.bytes_sent += nbytes
            schedule.close()
            return nbytes

        return Posted(post)

    def clock(self) -> float:
        return 0.0


class Posted(Work[None]):
    began, ended, bytes_sent = 0.0, None, 0

    def __init__(self, post: Callable[[], int]) -> None:
        self._post, self._done = post, False

    def wait(self, timeout: float | None = None) -> None:
        if not self._done:
            self._done, self.bytes_sent = True, self._post()

    def is_completed(self) -> bool:
        return self._done

    def get_future(self) -> torch.futures.Future[None]:
        raise NotImplementedError


def told() -> Schedule[None]:
    yield Round(sends={1: Payload.of(torch.zeros(8, dtype=torch.uint8))})


def test_what_is_just_being_sent_aside_is_no_byte_of_training() -> None:
    """Else an epoch's bytes_sent depends on when it ended, and a run that was killed has other metrics."""
    comm = Posting()
    aside = ControlCommunicator(comm)
    meter, read = Meter(comm, aside), []
    for _ in range(3):
        work = aside.start(told(), facts="whether to stop", timeout=1.0)
        comm.bytes_sent += 100  # a step's
        read.append(meter.read())
        work.wait()
    assert [*read, meter.read()] == [100, 100, 100, 0]
