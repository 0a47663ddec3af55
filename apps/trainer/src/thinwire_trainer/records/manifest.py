"""A checkpoint's manifest: what belongs to it, with checksums. Without a manifest there is no checkpoint."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from io import BufferedReader
from pathlib import Path
from typing import Self

from thinwire_trainer.command_line.options import Settings
from thinwire_trainer.errors import DamagedError
from thinwire_trainer.records.durable import opened, write_aside
from thinwire_trainer.records.sealing import sealed, unsealed

NAME = "manifest.json"


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """One rank's file as it was written."""

    name: str
    nbytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> Self:
        """The record of a file as it is on disk."""
        with opened(path) as file:
            return cls._of(path.name, file)

    @classmethod
    def _of(cls, name: str, file: BufferedReader) -> Self:
        digest = hashlib.file_digest(file, "sha256")
        return cls(name=name, nbytes=file.tell(), sha256=digest.hexdigest())

    @contextmanager
    def checked(self, folder: Path) -> Iterator[BufferedReader]:
        """The file in `folder`, open; DamagedError if it is missing or another one than was written."""
        path = folder / self.name
        with opened(path) as file:
            found = FileRecord._of(self.name, file)
            if found.nbytes != self.nbytes:
                raise DamagedError(f"{path} is damaged: {found.nbytes} bytes, expected {self.nbytes}")
            if found != self:
                raise DamagedError(f"{path} is damaged: its checksum is not the one in {NAME}")
            file.seek(0)
            yield file


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """step: training steps taken. metrics_nbytes, metrics_sha256: of metrics.jsonl then; manifests of older versions
    have no checksum of it. files: one a rank, in rank order."""

    step: int
    metrics_nbytes: int
    settings: Settings
    files: list[FileRecord]
    metrics_sha256: str | None = None

    def write(self, folder: Path) -> None:
        """Make the checkpoint exist: the last thing that is done to its folder."""
        write_aside(folder / NAME, sealed(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The manifest of a checkpoint; DamagedError if a single byte of it has changed, or it is none."""
        path = folder / NAME
        content = unsealed(path)
        try:
            manifest = cls(**content | {"files": [FileRecord(**record) for record in content["files"]]})
            manifest._check(folder)
        except (TypeError, ValueError, KeyError) as error:
            raise DamagedError(f"{path} is not a manifest of this program ({error})") from None
        return manifest

    def _check(self, folder: Path) -> None:
        """ValueError for what no run has written."""
        names = [record.name for record in self.files]
        counts = [self.step, self.metrics_nbytes, *(record.nbytes for record in self.files)]
        digests = [self.metrics_sha256 or "", *(record.sha256 for record in self.files)]
        if not all(type(count) is int and count >= 0 for count in counts) or {*map(type, digests)} != {str}:
            raise ValueError("a number of steps or bytes, or a checksum, is none")
        if not isinstance(self.settings, dict):
            raise ValueError("the settings are none")
        if not names or names != [file_name(rank) for rank in range(len(names))]:
            raise ValueError("its files are not those of ranks 0, 1, …")
        if folder.name != folder_name(self.step):
            raise ValueError(f"it is of the checkpoint {folder_name(self.step)}: the folder was copied or renamed")


def folder_name(step: int) -> str:
    """Of the checkpoint after so many steps."""
    return f"{step:08d}"


def file_name(rank: int) -> str:
    """Of a rank's part."""
    return f"rank{rank}.pt"
