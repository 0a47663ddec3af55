"""A checkpoint's manifest: what belongs to it, with checksums. Without a manifest there is no checkpoint."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from trainer.durable import write_aside
from trainer.errors import DamagedError
from trainer.options import Settings

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
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256")
        return cls(name=path.name, nbytes=path.stat().st_size, sha256=digest.hexdigest())

    def check(self, folder: Path) -> Path:
        """The file's path in `folder`; DamagedError if it is missing or another one than was written."""
        path = folder / self.name
        if not path.exists():
            raise DamagedError(f"{path} is missing")
        found = FileRecord.of(path)
        if found.nbytes != self.nbytes:
            raise DamagedError(f"{path} is damaged: {found.nbytes} bytes, expected {self.nbytes}")
        if found != self:
            raise DamagedError(f"{path} is damaged: its checksum is not the one in {NAME}")
        return path


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """step: training steps taken. metrics_nbytes: length of metrics.jsonl then. files: one a rank, in rank order."""

    step: int
    metrics_nbytes: int
    settings: Settings
    files: list[FileRecord]

    def render(self) -> str:
        """The file's text: the content and its own checksum."""
        content = asdict(self)
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        return json.dumps({"content": content, "sha256": digest}, indent=1, sort_keys=True) + "\n"

    def write(self, folder: Path) -> None:
        """Make the checkpoint exist: the last thing that is done to its folder."""
        write_aside(folder / NAME, self.render())

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The manifest of a checkpoint; DamagedError if a single byte of it has changed."""
        path = folder / NAME
        text = path.read_bytes()
        try:
            content = json.loads(text)["content"]
            manifest = cls(**content | {"files": [FileRecord(**record) for record in content["files"]]})
            intact = manifest.render().encode() == text
        except (ValueError, KeyError, TypeError):
            intact = False
        if not intact:
            raise DamagedError(f"{path} is damaged: its checksum is another one")
        return manifest
