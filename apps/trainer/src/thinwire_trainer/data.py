"""Data that users bring: files and their faults, folders that several processes fill, and what tells data apart."""

import fcntl
import hashlib
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from thinwire_trainer.errors import RunError


def read_text(path: Path) -> str:
    """Read a file of UTF-8 text, without a mark of its byte order.

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


T = TypeVar("T")
SHOWN = 3  # of the first ones why


@dataclass
class Faults:
    """skip: leave out what has a fault. found: why, for each that was left out, with its file."""

    skip: bool
    found: list[str] = field(default_factory=list)

    @contextmanager
    def one(self) -> Iterator[None]:
        """The block reads what belongs to one sample: a file, an utterance, a line. RunError, unless it is left out."""
        try:
            yield
        except (RunError, OSError) as error:
            reason = _reason(error)
            if not self.skip:
                raise RunError(f"{reason} (--skip-bad leaves such data out, and counts them)") from None
            self.found.append(reason)

    def usable(self, reads: Iterable[Callable[[], T]]) -> list[T]:
        """Results of reading one sample each, but for those that are left out."""
        kept = list[T]()
        for read in reads:
            with self.one():
                kept.append(read())
        return kept

    def told(self) -> str:
        """How many were left out, and of the first ones why; "" where none was."""
        if not self.found:
            return ""
        more = [f"and {len(self.found) - SHOWN:,} more"] if len(self.found) > SHOWN else []
        return f"--skip-bad left out {len(self.found):,}: {'; '.join([*self.found[:SHOWN], *more])}"

    def counted(self) -> dict[str, float]:
        """Number of samples left out, as the metric `skipped`, where data may be left out."""
        return {"skipped": float(len(self.found))} if self.skip else {}


def _reason(error: RunError | OSError) -> str:
    if isinstance(error, RunError):
        return str(error)
    return f"{error.filename} cannot be read: {error.strerror or error}"


def fingerprint(parts: Iterable[Tensor | str]) -> str:
    """A checksum of these parts in their order, and of how many there are: "3 parts, sha256 …".

    Tensors: any dtype that numpy has, on any device; shape and dtype count, too.
    """
    digest, count = hashlib.sha256(), 0
    for part in parts:
        count += 1
        if isinstance(part, str):
            content, kind = memoryview(part.encode()), "text"
        else:
            array = part.detach().cpu().contiguous().numpy()
            content, kind = array.reshape(-1).view("uint8").data, f"{array.dtype}{array.shape}"
        digest.update(f"{kind} {len(content)} ".encode())
        digest.update(content)
    return f"{count} parts, sha256 {digest.hexdigest()}"
