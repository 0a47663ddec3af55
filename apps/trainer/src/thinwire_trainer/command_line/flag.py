"""A flag that an app or an algorithm has of its own. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Value = str | int | float


@dataclass(frozen=True, kw_only=True)
class Flag:
    """A flag that only some algorithms, or one app, take. read: text -> value; choices: the only ones there are.

    default: what a run did before there was the flag, so that older runs can be resumed. An app's may be true or false,
    then there is a --no-NAME, too, or None.

    shapes: whether the value shapes the numbers that training computes, so that a run and its continuation share it.
    """

    name: str
    default: Value | None
    says: str
    read: Callable[[str], Value] = str
    choices: Sequence[str] | None = None
    metavar: str | None = None
    shapes: bool = True
