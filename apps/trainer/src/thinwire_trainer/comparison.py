"""Several trainings of one app, one after the other, in folders side by side."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from communicators import Communicator

from thinwire_trainer.agreement import all_or_none
from thinwire_trainer.app import App
from thinwire_trainer.command_line.flags import parse
from thinwire_trainer.errors import RunError
from thinwire_trainer.records.folder_lock import locked
from thinwire_trainer.records.metrics import Row, read_metrics
from thinwire_trainer.records.run_folder import RunFolder
from thinwire_trainer.run import run


def compared(
    app: App, flags: Mapping[str, Sequence[str]], output: Path, comm: Communicator, *, device: torch.device
) -> dict[str, list[Row]]:
    """Train in output/NAME as the flags of each name say; the metrics by name on rank 0, nothing elsewhere.

    Overwrites runs of earlier comparisons; AgreedError, before any training, where output/NAME holds another run.
    """
    with all_or_none(comm):
        if comm.rank == 0:
            RunFolder(output).prepare(resume=False)
            for name in flags:
                _require_own(RunFolder(output / name))
    with locked(output, comm):
        for name, given in flags.items():
            argv = [*given, "--overwrite", f"--output={output / name}"]
            run(app, replace(parse(argv, app, world_size=comm.size), compared=True), comm, device=device)
    with all_or_none(comm):
        return {name: read_metrics(RunFolder(output / name).metrics.path) for name in flags if comm.rank == 0}


def _require_own(folder: RunFolder) -> None:
    if folder.holds_run() and not (os.path.lexists(folder.config) and folder.recorded().get("compared")):
        raise RunError(
            f"{folder.path} already holds a run of yours, or of an older version's demo: give another folder with "
            "--output, or delete it"
        )
