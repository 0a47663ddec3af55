"""Board on which ranks agree who goes on: one record of the newest generation, changed by compare-and-swap alone."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from communicators.communicator import Communicator

RECORD = "record"
"""Key of the newest generation's record."""
PROBE_SECONDS = 3.0
"""Time for a connection between two ranks, where those of a whole group were not made in time."""


@dataclass(frozen=True)
class Record:
    """A generation: a group of ranks that stays the same.

    Attributes:
        generation: Its number, from 1 on; 0 before ranks have met.
        members: Names of its ranks, in their order.
        joined: Those of them who are new, and have no state yet.
        taken: Atomic exchanges that stand, on every rank.
        drawn: Batches that each rank of the generation before has drawn: a dead one, at its last commit.
        committed: Those of them that it had drawn by its last commit.
        run: Name of who began the training: of two on one board, as after a Store was lost, ranks know their own.
        alike: Settings of who began it, which all ranks share.
    """

    generation: int = 0
    members: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()
    taken: int = 0
    drawn: tuple[int, ...] = ()
    committed: tuple[int, ...] = ()
    run: str = ""
    alike: str = ""

    @property
    def settled(self) -> tuple[str, ...]:
        """Members that are not new."""
        return tuple(name for name in self.members if name not in self.joined)

    def text(self) -> str:
        """The record for the board; nothing before ranks have met."""
        return json.dumps(asdict(self)) if self.generation else ""

    @staticmethod
    def of(text: str) -> Record:
        """The record of a text."""
        return Record(**_content(json.loads(text or "{}")))


@dataclass(frozen=True)
class Said:
    """Announcement of a rank that it would be in the next generation.

    Attributes:
        taken: Atomic exchanges that stand here.
        holds: Whether the result of one more is here, of which is not known whether all have it.
        drawn: Batches drawn here in this generation.
        committed: Batches that every rank had drawn at the last commit.
        waiting: Newcomers whom this rank has seen; of one between two steps only.
        out: Whether this rank does not go on: nobody need wait for it.
        failed: Whether the current generation did not come together here.
        unreached: Ranks, of those where it has failed, to whom this one finds no connection; None before it has looked.
    """

    taken: int
    holds: bool = False
    drawn: int = 0
    committed: tuple[int, ...] = ()
    waiting: tuple[str, ...] = ()
    out: bool = False
    failed: bool = False
    unreached: tuple[str, ...] | None = None


class Board(ABC):
    """Keys with texts that all ranks share, each changed in one piece; and the way to a group of ranks that met there.

    Attributes:
        name: This rank's own name, which no other has, and which it never had before.
        launched: Ranks that a launcher has started at once; 0 where that is not known.
        patience: Seconds to wait for a board that has never answered; TimeoutError then.
        settling: Seconds in which ranks who train tell their record to a new board.
    """

    name: str
    launched: int = 0
    patience: float = math.inf
    settling: float = 0.0

    @abstractmethod
    def get(self, key: str) -> str:
        """Text of a key, "" where there is none."""

    @abstractmethod
    def swap(self, key: str, expected: str, desired: str) -> str:
        """Replaces a text, if it is still the expected one ("": none); returns the text afterwards."""

    @abstractmethod
    def append(self, key: str, text: str) -> None:
        """Adds to the end of a text."""

    @abstractmethod
    def pause(self, seconds: float) -> None:
        """Lets others go on for a while."""

    @abstractmethod
    def clock(self) -> float:
        """Seconds, monotonic."""

    @abstractmethod
    def wait_in_line(self) -> None:
        """Shows that this newcomer waits, under a name that it has not had; called again and again."""

    @abstractmethod
    def leave_line(self) -> None:
        """Ends waiting."""

    @abstractmethod
    def waiting(self) -> tuple[str, ...]:
        """Names of newcomers who wait now, in their order; does not block."""

    @abstractmethod
    def connect(self, record: Record, timeout: float) -> Communicator:
        """Communicator of a generation's ranks. Raises CollectiveError where they do not all come in time."""

    @abstractmethod
    def unreached(self, generation: int, names: Sequence[str]) -> tuple[str, ...]:
        """Those of some ranks, who look too, to whom this one finds no connection. generation: the coming one."""

    def at_exit(self, close: Callable[[], object]) -> None:  # noqa: B027 - simulated ranks do not exit
        """Has a real process call this at its end, while it can still tell others, unless it has retired by then."""

    def retire(self) -> None:  # noqa: B027 - simulated ranks have no thread that looks
        """Ends looking who waits, and forgets what was to be called at the end: this rank takes part no longer."""

    def record(self) -> Record:
        """Newest generation."""
        return Record.of(self.get(RECORD))

    def say(self, generation: int, said: Said) -> None:
        """Announces that this rank would be in that generation."""
        self.append(f"said/{generation}", json.dumps([self.name, asdict(said)]) + "\n")

    def said(self, generation: int, members: Iterable[str]) -> dict[str, Said]:
        """Last announcements of these ranks for that generation, by name, in the order of the names; one look."""
        last = _announcements(self.get(f"said/{generation}"))
        return {name: last[name] for name in members if name in last}


@lru_cache(maxsize=4)
def _announcements(text: str) -> dict[str, Said]:
    """Last announcement of each name; kept, as ranks look again and again."""
    return {name: Said(**_content(said)) for name, said in map(json.loads, text.splitlines())}


def _content(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields as `json` reads them, with tuples for its lists."""
    return {name: tuple(held) if isinstance(held, list) else held for name, held in fields.items()}
