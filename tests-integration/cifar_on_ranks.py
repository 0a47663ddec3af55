"""Runs of the cifar app under mpiexec, several inside one launch; rank 0 writes what came of each.

usage: mpiexec -n 4 python cifar_on_ranks.py killed FOLDER STEP RANK | resumed FOLDER | refused FOLDER
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

from mpi4py import MPI
from thinwire_cifar.__main__ import APP
from thinwire_trainer.command import main

WORLD = MPI.COMM_WORLD
RANK = WORLD.rank
TRAIN = "--dnn resnet20 --dataset digits --compression --compressor gtopk --density 0.01 --max-epochs 2"
EVERY = 3  # steps, between the checkpoints of the run that is killed
SHORT = "--algorithm gtopk --batch-size 128 --max-epochs 1 --checkpoint-every 1"


def killed(folder, step, rank):
    """Killed by SIGKILL while `rank` writes the checkpoint of `step`; before the first kill the same run to its end."""
    if not (folder / "straight").exists():
        WORLD.Barrier()
        assert main(APP, [*TRAIN.split(), "--output", f"{folder}/straight"]) == 0
    from thinwire_trainer.records import checkpoint

    write = checkpoint.write_tensors

    def torn(path, state):
        write(path, state)
        if path.parent.name == f"{step:08d}" and rank == RANK:
            os.truncate(path, path.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    checkpoint.write_tensors = torn
    again = ["--resume"] if (folder / "broken").exists() else []
    WORLD.Barrier()
    main(APP, [*TRAIN.split(), "--output", f"{folder}/broken", "--checkpoint-every", f"{EVERY}", *again])


def resumed(folder):
    """What was killed, to its end."""
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        flags = [*TRAIN.split(), "--output", f"{folder}/broken", "--checkpoint-every", "5", "--resume"]
        assert main(APP, flags) == 0
    if RANK == 0:
        (folder / "resumed.txt").write_text(shown.getvalue())


def refused(folder):
    """Everything that a user can get wrong, each attempt with flags of this rank and an app, and at last a fault."""
    short = folder / "short" / "cifar-10-batches-bin"
    if RANK == 0:
        short.mkdir(parents=True)
        for name in [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]:
            (short / f"{name}.bin").write_bytes(bytes(3073 * 10 - 1))
    WORLD.Barrier()
    out = ["--output", str(folder / "run")]
    report = {
        "unknown model": attempt(["--dnn", "vgg"]),
        "density above 1": attempt(["--density", "1.5"]),
        "density 0 on rank 2": attempt(["--density", "0"] if RANK == 2 else []),
        "other world size": attempt(["--nworkers", "3"]),
        "no data": attempt(["--dataset", "cifar10", "--data-dir", str(folder)]),
        "truncated data": attempt(["--dataset", "cifar10", "--data-dir", str(folder / "short")]),
        "other flags on rank 3": attempt([*out, "--lr", "0.2" if RANK == 3 else "0.1"]),
        "trains": attempt([*SHORT.split(), *out]),
        "exists": attempt([*SHORT.split(), *out]),
        "no data on rank 1": attempt([*SHORT.split(), *out, "--overwrite"], app=without_data_on(1)),
    }
    if RANK == 0:
        newest = sorted((folder / "run" / "checkpoints").iterdir())[-1] / "rank3.pt"
        newest.write_bytes(newest.read_bytes()[:-100])
    WORLD.Barrier()
    report |= {
        "damaged checkpoint": attempt([*SHORT.split(), *out, "--resume"]),
        "previous checkpoint": attempt([*SHORT.split(), *out, "--resume", "previous"]),
        "nan, dense": attempt(["--lr", "1e30", "--output", str(folder / "nan-dense")]),
        "nan, sparse": attempt(["--algorithm", "gtopk", "--lr", "1e30", "--output", str(folder / "nan-sparse")]),
        # The last one: a communicator whose ranks disagreed is of no more use.
        "other model on rank 1": attempt(["--output", str(folder / "other")], app=narrow_on(1)),
    }
    if RANK == 0:
        (folder / "report.json").write_text(json.dumps(report))
    fault(folder)


def attempt(flags, app=APP):
    """Exit code and standard error of every rank."""
    with contextlib.redirect_stderr(io.StringIO()) as error, contextlib.redirect_stdout(io.StringIO()):
        code = main(app, flags)
    return WORLD.allgather((code, error.getvalue()))


def without_data_on(rank):
    from thinwire_trainer.errors import RunError

    def build(options, device):
        if rank == RANK:
            raise RunError("the disk of this machine is empty")
        return APP.build(options, device)

    return replace(APP, build=build)


def narrow_on(rank):
    def build(options, device):
        task = APP.build(options, device)
        if rank == RANK:
            task.model.classify.weight.data = task.model.classify.weight.data[:, 1:]
        return task

    return replace(APP, build=build)


def fault(folder):
    """A fault in the program on one rank only."""

    def build(options, device):
        if RANK == 1:
            raise ZeroDivisionError("ours")
        return APP.build(options, device)

    main(replace(APP, build=build), ["--output", str(folder / "fault")])


if __name__ == "__main__":
    {"killed": killed, "resumed": resumed, "refused": refused}[sys.argv[1]](Path(sys.argv[2]), *map(int, sys.argv[3:]))
