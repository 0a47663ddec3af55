"""Files as they were published: where they come from, and whether those here are the same."""

import hashlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from thinwire_trainer.launching.placement import placement


@dataclass(frozen=True, kw_only=True)
class Remote:
    """A published file. checksum: "md5:…" or "sha1:…" of it as it is fetched."""

    url: str
    checksum: str

    @property
    def name(self) -> str:
        """Its own name."""
        return self.url.rpartition("/")[2]


def difference(name: str, content: bytes, *, records: int, expected: int, checksum: str) -> str:
    """How a file that could be read differs from the published one, or "" if it does not."""
    if records != expected:
        return f"{name} has {records:,} images instead of {expected:,}"
    kind, _, digest = checksum.partition(":")
    if hashlib.new(kind, content, usedforsecurity=False).hexdigest() != digest:
        return f"{name} has another {kind.upper()}"
    return ""


def warn(folder: Path, differences: Sequence[str]) -> None:
    """One line on standard error, from one rank, if there are any: such files are used, but not in silence."""
    found = [text for text in differences if text]
    if found and placement(os.environ).rank == 0:
        others = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        _say(f"{folder} does not hold the published files, and is used as it is: {found[0]}{others}")


@cache
def _say(text: str) -> None:
    """Once in a process, which may hold many ranks of a simulated world."""
    print(f"cifar: warning: {text}", file=sys.stderr, flush=True)
