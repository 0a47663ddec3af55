"""Checkpoints of all ranks that survive a kill at any moment.

    OUTPUT/checkpoints/00000120/rank0.pt …      one file a rank: its replica's state
    OUTPUT/checkpoints/00000120/manifest.json   names what belongs together, with checksums; appears last

The newest are kept, as many as --keep says. All ranks see the same folder (on several machines: a shared file system).
Only folders with such a name are checkpoints; whatever else lies there is left alone.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, Self

import torch
from communicators import Communicator

from thinwire_trainer.agreement import all_or_none, gather_texts
from thinwire_trainer.command_line.options import KEEP, Settings
from thinwire_trainer.errors import AgreedError, DamagedError, RunError
from thinwire_trainer.records.durable import (
    opened,
    remove_folder,
    sealed,
    sync_folder,
    unsealed,
    write_aside,
    write_tensors,
)
from thinwire_trainer.records.metrics import MetricsFile

NAME = "manifest.json"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """step: training steps taken. metrics_nbytes, metrics_sha256: of metrics.jsonl then; manifests of older versions
    have no checksum of it. files: name, length and checksum of one a rank, in rank order."""

    step: int
    metrics_nbytes: int
    settings: Settings
    files: list[dict[str, Any]]
    metrics_sha256: str | None = None

    def write(self, folder: Path) -> None:
        """Make the checkpoint exist: the last thing that is done to its folder."""
        write_aside(folder / NAME, sealed(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The manifest of a checkpoint; DamagedError if a single byte of it has changed, or it is none."""
        try:
            manifest = cls(**unsealed(folder / NAME))
        except TypeError as error:
            raise DamagedError(f"{folder / NAME} is not a manifest of this program ({error})") from None
        if strange := manifest._strange():
            raise DamagedError(f"{folder / NAME} is not a manifest of this program (its {strange} are others)")
        return manifest

    def _strange(self) -> str:
        """First field that is not of its kind; "" for none: a checksum tells damage, and not who has written it."""
        records = isinstance(self.files, list) and all(isinstance(one, dict) for one in self.files)
        fits = {
            "step": type(self.step) is int and self.step >= 0,
            "metrics_nbytes": type(self.metrics_nbytes) is int and self.metrics_nbytes >= 0,
            "metrics_sha256": isinstance(self.metrics_sha256, str | None),
            "settings": isinstance(self.settings, dict),
            "files": records
            and len(self.files) > 0
            and all({"name", "nbytes", "sha256"} <= one.keys() for one in self.files),
        }
        return next((name for name, good in fits.items() if not good), "")


def record_of(name: str, file: BufferedReader) -> dict[str, Any]:
    """Name, length and checksum of a file as it is on disk."""
    digest = hashlib.file_digest(file, "sha256")
    return {"name": name, "nbytes": file.tell(), "sha256": digest.hexdigest()}


def folder_name(step: int) -> str:
    """Name of the checkpoint's folder after so many steps."""
    return f"{step:08d}"


def file_name(rank: int) -> str:
    """Name of a rank's file."""
    return f"rank{rank}.pt"


State = dict[str, Any]


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one run, the newest so many."""

    path: Path
    keep: int = KEEP

    def save(self, step: int, state: State, comm: Communicator, *, metrics: MetricsFile, settings: Settings) -> None:
        """Write this rank's state; on return the checkpoint exists, for all ranks or (AgreedError) for none.

        metrics: looked at on rank 0 only, which writes them.
        """
        folder = self.path / folder_name(step)
        try:
            self._save(folder, step, state, comm, metrics, settings)
        except AgreedError:
            if comm.rank == 0 and not os.path.lexists(folder / NAME) and not _in_the_way(folder):
                remove_folder(folder, first=NAME)  # a part of a checkpoint is of no use, and the disk may be full
            raise

    def _save(
        self, folder: Path, step: int, state: State, comm: Communicator, metrics: MetricsFile, settings: Settings
    ) -> None:
        with all_or_none(comm):
            if comm.rank == 0:
                if _in_the_way(folder):
                    raise RunError(f"{folder} is not a folder, but a checkpoint has to go there: move it away")
                remove_folder(folder, first=NAME)  # what a killed run, or a later one than was resumed, left here
                folder.mkdir(parents=True)
        record = ""
        with all_or_none(comm):
            path = folder / file_name(comm.rank)
            write_tensors(path, state)
            with opened(path) as file:
                record = json.dumps(record_of(path.name, file))
        files = [json.loads(text) for text in gather_texts(record, comm)]
        with all_or_none(comm):
            if comm.rank == 0:
                sync_folder(folder)
                nbytes, sha = metrics.digest()
                made = Manifest(step=step, metrics_nbytes=nbytes, metrics_sha256=sha, settings=settings, files=files)
                made.write(folder)
                self._prune()

    def complete(self) -> list[Path]:
        """The checkpoints that exist, oldest first."""
        return [folder for folder in self._folders() if os.path.lexists(folder / NAME)]

    def choose(self, which: str) -> Path | None:
        """The "latest" checkpoint or the "previous" one; None where there is none at all."""
        found = self.complete()
        if which == "previous" and len(found) < 2:
            raise RunError(f"{self.path} holds {len(found)} checkpoint(s): there is no previous one to resume")
        return found[-1 if which == "latest" else -2] if found else None

    def discard_after(self, chosen: Path) -> None:
        """Delete the checkpoints newer than `chosen`: the run goes on from there and will make them anew."""
        found = self.complete()
        for folder in found[found.index(chosen) + 1 :]:
            remove_folder(folder, first=NAME)

    def delete(self) -> None:
        """Delete all checkpoints, complete or not, and nothing else that may lie there."""
        for folder in self._folders():
            remove_folder(folder, first=NAME)
        with suppress(OSError):  # there is none, or it holds something else
            self.path.rmdir()

    def _prune(self) -> None:
        kept = self.complete()[-self.keep :]
        for folder in self._folders():
            if folder not in kept:
                remove_folder(folder, first=NAME)

    def _folders(self) -> list[Path]:
        """Folders with a checkpoint's name, complete or not, oldest first."""
        if not os.path.lexists(self.path):
            return []
        if not self.path.is_dir():
            raise RunError(f"{self.path} is not a folder, but checkpoints are to go there: move it away")
        steps = sorted(int(entry.name) for entry in self.path.iterdir() if _is_checkpoint(entry))
        return [self.path / folder_name(step) for step in steps]


def load(folder: Path, manifest: Manifest, rank: int) -> State:
    """A rank's state; DamagedError says which file is missing or damaged."""
    path, written = folder / file_name(rank), manifest.files[rank]
    with opened(path) as file:
        found = record_of(path.name, file)
        if found["nbytes"] != written["nbytes"]:
            raise DamagedError(f"{path} is damaged: {found['nbytes']} bytes, expected {written['nbytes']}")
        if found != written:
            raise DamagedError(f"{path} is damaged: its checksum is not the one in {NAME}")
        file.seek(0)
        state: State = torch.load(file, map_location="cpu", weights_only=True)
    return state


def mean_of(models: Sequence[State], names: Iterable[str]) -> State:
    """Means over ranks of these tensors of their models."""
    ranks = {name: torch.stack([model[name].double() for model in models]) for name in names}
    return {name: values.mean(0).to(models[0][name].dtype) for name, values in ranks.items()}


def _is_checkpoint(entry: Path) -> bool:
    name = entry.name
    numbered = name.isascii() and name.isdigit() and name == folder_name(int(name))
    return numbered and entry.is_dir() and not entry.is_symlink()


def _in_the_way(folder: Path) -> bool:
    return os.path.lexists(folder) and not _is_checkpoint(folder)
