"""Files that survive a kill and a power cut, and tell when they are damaged."""

import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

import torch

from thinwire_trainer.errors import DamagedError


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """An OSError of the block names the file, also where the system does not: a write that finds no space left."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from None


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Replace a file at once by what the block writes: whoever looks sees the old one or the new one, never a part.

    Links and pipes in its place are replaced, not written to.
    """
    aside = path.with_name(f"{path.name}.part")
    with naming(path):
        aside.unlink(missing_ok=True)  # left by a kill
        try:
            with aside.open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, path)
        except OSError:
            with suppress(OSError):
                aside.unlink()  # gives the space back
            raise
        sync_folder(path.parent)


def write_aside(path: Path, text: str) -> None:
    """Replace a file by this text."""
    with replacing(path) as file:
        file.write(text.encode())


def write_tensors(path: Path, state: dict[str, Any]) -> None:
    """Replace a file by what torch.load reads from it; OSError if the disk is full."""
    with replacing(path) as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:  # torch trips over a full disk once more, while it closes its archive
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def sync_folder(folder: Path) -> None:
    """Force a folder's entries to disk, without which a renamed file may be gone after a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_folder(folder: Path, *, first: str) -> None:
    """Delete a folder, the file named `first` before all others: without it the rest means nothing."""
    with suppress(FileNotFoundError, IsADirectoryError):
        (folder / first).unlink()
    shutil.rmtree(folder, ignore_errors=True)


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


def sealed(content: dict[str, Any]) -> str:
    """The file's text: the content and its own checksum."""
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return json.dumps({"content": content, "sha256": digest}, indent=1, sort_keys=True) + "\n"


def unsealed(path: Path) -> dict[str, Any]:
    """The content of such a file; DamagedError if a single byte of it has changed, or it is none."""
    with opened(path) as file:
        text = file.read()
    try:
        content: dict[str, Any] = json.loads(text)["content"]
        intact = sealed(content).encode() == text
    except (ValueError, KeyError, TypeError, RecursionError):
        intact = False
    if not intact:
        raise DamagedError(f"{path} is damaged: its checksum is another one")
    return content
