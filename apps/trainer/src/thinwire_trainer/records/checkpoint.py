"""Checkpoints of all ranks that survive a kill at any moment.

    OUTPUT/checkpoints/00000120/rank0.pt …      one file a rank: its replica's state
    OUTPUT/checkpoints/00000120/manifest.json   what belongs together, with checksums; appears last

The newest are kept, as many as --keep says. All ranks see the same folder (on several machines: a shared file system).
Only folders with such a name are checkpoints; whatever else lies there is left alone.
"""

import json
import os
import zipfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch
from communicators import Communicator

from thinwire_trainer.all_or_none import all_or_none, gather_texts
from thinwire_trainer.command_line.options import KEEP, Settings
from thinwire_trainer.errors import AgreedError, DamagedError, RunError
from thinwire_trainer.records.durable import remove_folder, sync_folder, write_tensors
from thinwire_trainer.records.manifest import NAME, FileRecord, Manifest, file_name, folder_name
from thinwire_trainer.records.metrics import MetricsFile

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
            origin = origin_of(step, settings, rank=comm.rank, size=comm.size)
            record = json.dumps(asdict(_write(folder / file_name(comm.rank), {**state, "origin": origin})))
        files = [FileRecord(**json.loads(text)) for text in gather_texts(record, comm)]
        with all_or_none(comm):
            if comm.rank == 0:
                sync_folder(folder)
                nbytes, sha256 = metrics.digest()
                Manifest(step=step, metrics_nbytes=nbytes, metrics_sha256=sha256, settings=settings, files=files).write(
                    folder
                )
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
    """A rank's state; DamagedError says which file is missing or damaged, or another rank's, step's or run's."""
    path = folder / file_name(rank)
    expected = origin_of(manifest.step, manifest.settings, rank=rank, size=len(manifest.files))
    with manifest.files[rank].checked(folder) as file:
        try:
            require_stored(file)
            state: State = torch.load(file, map_location="cpu", weights_only=True)
            origin = state.pop("origin", expected)  # older versions wrote none
            fits = json.dumps(origin, sort_keys=True) == json.dumps(expected, sort_keys=True)
        except Exception as error:  # whatever a file that somebody else has made brings about
            raise DamagedError(f"{path} is not a checkpoint's file ({type(error).__name__})") from None
    if not fits:
        raise DamagedError(f"{path} belongs to another rank, step or run than its name and {NAME} say")
    return state


def origin_of(step: int, settings: Settings, *, rank: int, size: int) -> State:
    """What tells a rank's file from all others: runs with these in common have the same bits."""
    return {"step": step, "rank": rank, "world_size": size, "settings": settings}


def require_stored(file: BufferedReader) -> None:
    """ValueError if the file is not an uncompressed zip archive, as torch.save writes, or a checksum in it is wrong.

    torch.load looks at none of these checksums, and takes older formats too.
    """
    with zipfile.ZipFile(file) as archive:
        parts = archive.infolist()
        if any(part.compress_type != zipfile.ZIP_STORED for part in parts):
            raise ValueError("compressed")
        if sum(part.file_size for part in parts) > file.seek(0, os.SEEK_END) or archive.testzip() is not None:
            raise ValueError("damaged")
    file.seek(0)


def _is_checkpoint(entry: Path) -> bool:
    name = entry.name
    numbered = name.isascii() and name.isdigit() and name == folder_name(int(name))
    return numbered and entry.is_dir() and not entry.is_symlink()


def _in_the_way(folder: Path) -> bool:
    return os.path.lexists(folder) and not _is_checkpoint(folder)


def _write(path: Path, state: State) -> FileRecord:
    write_tensors(path, state)
    return FileRecord.of(path)
