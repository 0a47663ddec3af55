"""Checkpoints of all ranks that survive a kill at any moment.

    OUTPUT/checkpoints/00000120/rank0.pt …      one file a rank: its replica's state
    OUTPUT/checkpoints/00000120/manifest.json   what belongs together, with checksums; appears last

The two newest checkpoints are kept. All ranks see the same folder (on several machines: a shared file system).
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from communicators import Communicator

from trainer.agreement import gather_texts, together
from trainer.durable import remove_folder, sync_folder, write_tensors
from trainer.errors import RunError
from trainer.manifest import NAME, FileRecord, Manifest
from trainer.options import Settings

KEPT = 2
State = dict[str, Any]


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one run."""

    path: Path

    def save(self, step: int, state: State, comm: Communicator, *, metrics_nbytes: int, settings: Settings) -> None:
        """Write this rank's state; on return the checkpoint exists, for all ranks or (AgreedError) for none.

        metrics_nbytes: looked at on rank 0 only, which writes the metrics.
        """
        folder = self.path / f"{step:08d}"
        with together(comm):
            if comm.rank == 0:
                remove_folder(folder, first=NAME)  # what a killed run, or a later one than was resumed, left here
                folder.mkdir(parents=True)
        record = ""
        with together(comm):
            record = json.dumps(asdict(_write(folder / f"rank{comm.rank}.pt", state)))
        files = [FileRecord(**json.loads(text)) for text in gather_texts(record, comm)]
        with together(comm):
            if comm.rank == 0:
                sync_folder(folder)
                Manifest(step=step, metrics_nbytes=metrics_nbytes, settings=settings, files=files).write(folder)
                self._prune()

    def complete(self) -> list[Path]:
        """The checkpoints that exist, oldest first."""
        return sorted(path.parent for path in self.path.glob(f"*/{NAME}"))

    def choose(self, which: str) -> Path | None:
        """The "latest" checkpoint or the "previous" one; None where there is none at all."""
        found = self.complete()
        if which == "previous" and len(found) < KEPT:
            raise RunError(f"{self.path} holds {len(found)} checkpoint(s): there is no previous one to resume")
        return found[-1 if which == "latest" else -2] if found else None

    def discard_after(self, chosen: Path) -> None:
        """Delete the checkpoints newer than `chosen`: the run goes on from there and will make them anew."""
        for folder in self.complete():
            if folder > chosen:
                remove_folder(folder, first=NAME)

    def _prune(self) -> None:
        kept = self.complete()[-KEPT:]
        for folder in self.path.iterdir():
            if folder not in kept:
                remove_folder(folder, first=NAME)


def load(folder: Path, manifest: Manifest, rank: int) -> State:
    """A rank's state; DamagedError says which file is missing or damaged."""
    path = manifest.files[rank].check(folder)
    state: State = torch.load(path, map_location="cpu", weights_only=True)
    return state


def _write(path: Path, state: State) -> FileRecord:
    write_tensors(path, state)
    return FileRecord.of(path)
