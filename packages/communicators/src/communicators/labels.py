"""Labels of blocks, at next to no cost while nobody records.

torch.profiler records those of the threads that it sees: where it was started, and backward's. One that sees all
threads crashes now and then where another works while it ends, so `tracing.recording` keeps the others' labels itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from torch import autograd
from torch.autograd import profiler

T = TypeVar("T")
_NOBODY: AbstractContextManager[object] = nullcontext()
_kept: list[Span] | None = None


class Span(AbstractContextManager[None]):
    """Block that is kept when it ends, maybe in another thread; times in ns since the epoch."""

    def __init__(self, name: str, kept: list[Span]) -> None:
        self.name, self._kept = name, kept
        self.thread = self.began = self.ended = 0

    def __enter__(self) -> None:
        self.thread, self.began = threading.get_native_id(), time.time_ns()

    def __exit__(self, *_: object) -> None:
        self.ended = time.time_ns()
        self._kept.append(self)

    def event(self, pid: int, base: int) -> dict[str, Any]:
        """Event in the trace event format, with times after `base`, in ns."""
        when = {"ts": (self.began - base) / 1e3, "dur": (self.ended - self.began) / 1e3}
        about = {"ph": "X", "cat": "user_annotation", "name": self.name, "pid": pid, "tid": self.thread}
        return {**about, **when, "args": {}}


def labelled(name: str) -> AbstractContextManager[object]:
    """Labels a block where torch.profiler or `recording` records; else nothing happens, which takes a fifth of a µs.

    Labels of a thread nest: a block that begins inside another one ends there, too.
    torch has no public way to ask whether anybody records, and in which threads: where the private ones are missing,
    torch is given all labels, which takes 6 µs each.
    """
    if not _records():
        return _NOBODY
    seen = getattr(autograd, "_profiler_enabled", None)
    return profiler.record_function(name) if seen is None or seen() else spanning(name)


def spanning(name: str) -> AbstractContextManager[object]:
    """Labels a block that may overlap others and end in another thread; only `recording` has it."""
    return _NOBODY if _kept is None else Span(name, _kept)


def unseen(start: Callable[[], T]) -> T:
    """Starts work, of which torch.profiler sees nothing.

    Where a profile ends before the work that it has seen begin, torch writes the end of that to memory that is free
    then (2.13 and before).
    """
    if not _records():
        return start()
    see = getattr(autograd, "_enable_record_function", lambda _: None)
    see(False)
    try:
        return start()
    finally:
        see(True)


def _records() -> bool:
    """Whether any torch.profiler records."""
    return bool(getattr(profiler, "_is_profiler_enabled", True))


def are_kept() -> bool:
    """Whether labels of all threads are kept."""
    return _kept is not None


def keep(into: list[Span] | None) -> None:
    """Keeps labels of all threads there from now on; None: nowhere."""
    global _kept
    _kept = into
