"""Reading what somebody else may have put there: regular files only, because a FIFO would be waited for for ever."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path

from trainer.errors import DamagedError


@contextmanager
def opened(path: Path) -> Iterator[BufferedReader]:
    """The file, for reading; DamagedError if it is missing or not a regular one. Links are followed."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        raise DamagedError(f"{path} is missing") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DamagedError(f"{path} is not a file but a folder, a pipe or a device")
    with os.fdopen(descriptor, "rb") as file:
        yield file
