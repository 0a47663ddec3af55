"""A flag of the command line. Imports nothing heavy."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

Value = str | int | float


@dataclass(frozen=True)
class Flag:
    """A flag of all runs, of some algorithms, or of one app. says: its help.

    default: what a run did before there was the flag, so that older runs can be resumed. True or False: there is a
    --no-NAME, too. read: text -> value; choices: the only ones there are; several: takes a list of them.
    shapes: whether the value shapes the numbers that training computes, so that a run and its continuation share it;
    of the flags of all runs `NOT_SETTINGS` says so.
    """

    name: str
    default: Value | Path | None
    says: str
    read: Callable[[str], Value | Path] = str
    choices: Sequence[str] | None = None
    metavar: str | None = None
    shapes: bool = True
    several: bool = False
