"""Board on which ranks agree who goes on: one record of the newest generation, changed by compare-and-swap alone."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from typing import Any, TypeVar

from communicators.communicator import Communicator
from communicators.errors import CollectiveError

RECORD = "record"
"""Key of the newest generation's record."""
MOST_COUNTED = 1 << 48
"""Bound of every number on a board."""
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
        """The record of a text. CollectiveError for one that no rank has written."""
        record = _read(Record, parsed(text or "{}"))
        fits = set(record.joined) <= set(record.members) and len(set(record.members)) == len(record.members)
        fits = fits and (record.settled or not record.members) and len(record.drawn) == len(record.committed)
        if not fits or bool(record.generation) != bool(text):
            raise unreadable(text)
        return record


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
        connections: To each peer, of the groups that meet here.
        settling: Seconds in which ranks who train tell their record to a new board.
    """

    name: str
    launched: int = 0
    patience: float = math.inf
    connections: int = 1
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

    @abstractmethod
    def at_exit(self, close: Callable[[], object]) -> None:
        """Has this called at the rank's end, while it can still tell others, unless it has retired by then."""

    @abstractmethod
    def retire(self) -> None:
        """Ends looking who waits, and forgets what was to be called at the end: this rank takes part no longer."""

    def record(self) -> Record:
        """Newest generation."""
        return Record.of(self.get(RECORD))

    def say(self, generation: int, said: Said) -> None:
        """Announces that this rank would be in that generation."""
        self.append(f"said/{generation}", json.dumps([self.name, asdict(said)]) + "\n")

    def said(self, generation: int, members: Iterable[str]) -> dict[str, Said]:
        """Last announcements of these ranks for that generation, by name, in the order of the names; one look.

        members: all ranks of the generation before.
        """
        last, members = _announcements(self.get(f"said/{generation}")), tuple(members)
        here = {name: last[name] for name in members if name in last}
        for name, said in here.items():
            if len(said.committed) != len(members):
                raise unreadable(f"{name}: {said}")
        return here


T = TypeVar("T")
IS: dict[str, Callable[[Any], bool]] = {
    "bool": lambda held: type(held) is bool,
    "int": lambda held: type(held) is int and 0 <= held < MOST_COUNTED,
    "str": lambda held: type(held) is str,
    "tuple[int, ...]": lambda held: type(held) is tuple and all(map(IS["int"], held)),
    "tuple[str, ...]": lambda held: type(held) is tuple and all(map(IS["str"], held)),
    "tuple[str, ...] | None": lambda held: held is None or IS["tuple[str, ...]"](held),
}
"""Checks of a field's value, by the field's type."""


def unreadable(text: str) -> CollectiveError:
    """Error for an entry that no rank has written."""
    return CollectiveError(
        f"the board of the elastic ranks holds {text:.200}, which no rank of this version has written: a network that "
        "changes bits, or another program that uses the same Store; start the meeting place anew, or give another name="
    )


def parsed(text: str) -> Any:
    """Content of an entry. CollectiveError for what is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise unreadable(text) from None


def _read(kind: type[T], held: Any) -> T:
    """Record or announcement, with tuples for the lists of JSON. CollectiveError for other fields, or other types."""
    try:
        made = kind(**{name: tuple(one) if isinstance(one, list) else one for name, one in held.items()})
    except (TypeError, AttributeError):
        raise unreadable(str(held)) from None
    if not all(IS[str(field.type)](getattr(made, field.name)) for field in fields(made)):  # type: ignore[arg-type]
        raise unreadable(str(held))
    return made


@lru_cache(maxsize=4)
def _announcements(text: str) -> dict[str, Said]:
    """Last announcement of each name; kept, as ranks look again and again."""
    found = {}
    for line in text.split("\n")[:-1]:
        match parsed(line):
            case [str(name), said]:
                found[name] = _read(Said, said)
            case _:
                raise unreadable(line)
    return found


def names_in_line(text: str) -> list[str]:
    """Names of the newcomers who wait. CollectiveError for another text than ranks have written."""
    line = parsed(text or "[]")
    if not isinstance(line, list) or not all(map(IS["str"], line)):
        raise unreadable(text)
    return line
