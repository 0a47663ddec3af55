"""Files of data: text, and what can be wrong with it; folders that several processes fill."""

import fcntl
from codecs import BOM_UTF8
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from thinwire_trainer.errors import RunError


def read_text(path: Path) -> str:
    """What the file says, in UTF-8, without a mark of its byte order.

    RunError, naming it, if it is missing, cannot be read, is not UTF-8, or says nothing.
    """
    try:
        content = path.read_bytes().removeprefix(BOM_UTF8)
    except FileNotFoundError:
        raise RunError(f"{path} is missing") from None
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from None
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        line, byte = content[: error.start].count(b"\n") + 1, content[error.start]
        raise RunError(f"{path}, line {line}, is not UTF-8 (byte {byte:#04x}): convert it") from None
    if not text.strip():
        raise RunError(f"{path} is empty")
    return text


@contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """The block runs in one of the processes that share the folder, which is made, then in the next."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
