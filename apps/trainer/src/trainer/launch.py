"""Starting this program's own workers, where no launcher has."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from trainer.errors import RunError


def start_workers(module: str, argv: Sequence[str], workers: int) -> int:
    """Run `python -m MODULE ARGV` on so many ranks under mpiexec, to the end; returns its exit code.

    SIGINT and SIGTERM are handed on, so that stopping this process stops the workers.
    """
    command = [find_mpiexec(), "-n", str(workers), sys.executable, "-m", module, *argv]
    process: subprocess.Popen[bytes] | None = None

    def forward(number: int, frame: FrameType | None) -> None:
        del frame
        if process is None:
            sys.exit(128 + number)
        process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        process = subprocess.Popen(command, env=worker_environment(), stdin=subprocess.DEVNULL)
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code  # as a shell reports death by a signal


def find_mpiexec() -> str:
    """The launcher beside this Python (where the mpich wheel puts it), else the one on PATH."""
    beside = Path(sys.executable).parent / "mpiexec"
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        raise RunError(
            "--nworkers above 1 needs mpiexec, and there is none beside this Python or on PATH: "
            "pip install mpich mpi4py, or start the workers with torchrun"
        )
    return found


def worker_environment() -> dict[str, str]:
    """One thread per rank unless asked otherwise; colours and bars if this process has a terminal to show them."""
    environment = {"OMP_NUM_THREADS": "1"} | dict(os.environ)
    if sys.stdout.isatty():
        environment |= {"FORCE_COLOR": "1", "COLUMNS": str(shutil.get_terminal_size().columns)}
    return environment
