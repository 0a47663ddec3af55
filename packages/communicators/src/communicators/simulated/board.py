"""Board of a simulated world: texts in the loop's memory, each look at which takes the time of a small message."""

import json
from collections.abc import Callable, Sequence

from communicators.communicator import Communicator
from communicators.elastic.board import Board, Record
from communicators.errors import CollectiveError
from communicators.simulated.event_loop import EventLoop

LINE = "line"


class SimulatedBoard(Board):
    """Board of one rank of a world.

    kept: the texts, which all ranks share. group: makes the communicator of a generation, of its number and ranks.
    """

    def __init__(
        self, loop: EventLoop, place: int, kept: dict[str, str], group: Callable[[int, Sequence[int]], Communicator]
    ) -> None:
        self._loop, self._rank, self._kept, self._group, self.name = loop, place, kept, group, ""
        self._exits = False

    def get(self, key: str) -> str:
        self._step()
        return self._kept.get(key, "")

    def swap(self, key: str, expected: str, desired: str) -> str:
        self._step()
        if self._kept.get(key, "") == expected:
            self._kept[key] = desired
        return self._kept.get(key, "")

    def append(self, key: str, text: str) -> None:
        self._step()
        self._kept[key] = self._kept.get(key, "") + text

    def pause(self, seconds: float) -> None:
        self._loop.sleep(self._rank, seconds)

    def clock(self) -> float:
        return self._loop.now

    def wait_in_line(self) -> None:
        if not self.name:
            turns = int(self._kept.get(f"turns/{self._rank}", "0")) + 1
            self._kept[f"turns/{self._rank}"] = str(turns)
            self.name = f"{self._rank}.{turns}"
            self._kept[LINE] = json.dumps([*self._line(), self.name])

    def leave_line(self) -> None:
        self._kept[LINE] = json.dumps([name for name in self._line() if name != self.name])

    def waiting(self) -> tuple[str, ...]:
        return tuple(name for name in self._line() if self._loop.lives(_place(name)))

    def connect(self, record: Record, timeout: float) -> Communicator:
        """Communicator of all pairs; see `Board`."""
        loop, places = self._loop, [_place(name) for name in record.members]
        dark = loop.world.dark_among(places, loop.now)
        if dark > loop.now:
            late = dark - loop.now > timeout
            loop.sleep(self._rank, min(timeout, dark - loop.now))
            if late:
                raise CollectiveError(f"timed out after {timeout:g} s: not all connections were made")
        return self._group(record.generation, places)

    def unreached(self, generation: int, names: Sequence[str]) -> tuple[str, ...]:
        del generation
        loop = self._loop
        return tuple(name for name in names if loop.world.dark_until(self._rank, _place(name), loop.now) > loop.now)

    def at_exit(self, close: Callable[[], object]) -> None:
        def end() -> None:
            self._exits = True
            close()

        self._loop.at_exit[self._rank][self] = end

    def retire(self) -> None:
        self._loop.at_exit[self._rank].pop(self, None)

    def _line(self) -> list[str]:
        line: list[str] = json.loads(self._kept.get(LINE, "[]"))
        return line

    def _step(self) -> None:
        """Takes the time of a message, in which others may come first, and waits while the board is lost."""
        loop = self._loop
        loop.refuse_if_failed()
        back = loop.world.dark_until(self._rank, None, loop.now)
        back = max([back, *(end for begin, end in loop.world.outages if begin <= loop.now < end)])
        if self._exits and back > loop.now:
            raise TimeoutError("the board does not answer, and no rank waits for it to end")
        loop.sleep(self._rank, back - loop.now + max(loop.seconds_for(self._rank, 0, 0)))


def _place(name: str) -> int:
    return int(name.partition(".")[0])
