"""Signals that would end this process: turned into exceptions, or delayed while something is removed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def as_exceptions() -> Iterator[None]:
    """Turns SIGTERM and SIGHUP into SystemExit in the main thread, unless they are handled already."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return
    changed = [number for number in ENDING if signal.getsignal(number) is signal.SIG_DFL]
    for number in changed:
        signal.signal(number, _leave)
    try:
        yield
    finally:
        for number in changed:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def held_back() -> Iterator[None]:
    """Delays SIGINT, SIGTERM and SIGHUP until the end of the block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *ENDING})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
