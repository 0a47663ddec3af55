"""The Slurm job that is queued again: stopped before its time is over, it then goes on with its run."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

BESIDE = Path(sys.executable).parent
JOB = Path(__file__).parent.parent / "examples" / "slurm" / "requeue.sbatch"
LIMIT = 90  # seconds
STAND_INS = {
    "srun": f'#!/bin/sh\nshift\nexec "{BESIDE}/mpiexec" -n 2 "$@"\n',  # without --kill-on-bad-exit
    "scontrol": '#!/bin/sh\necho "$@" >> "$TOLD"\n',
    "python": f'#!/bin/sh\nexec "{sys.executable}" "$@"\n',
}
pytestmark = pytest.mark.mpi


@pytest.fixture
def job(tmp_path):
    """Starts the script where srun, scontrol and python are stand-ins; ends what a failure leaves."""
    (tmp_path / "bin").mkdir()
    for name, text in STAND_INS.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "SLURM_JOB_ID": "4711", "TOLD": str(tmp_path / "told")}
    jobs = []

    def start():
        command = ["bash", JOB]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        jobs.append(subprocess.Popen(command, cwd=tmp_path, env=environment, start_new_session=True, **pipes))
        return jobs[-1]

    yield start
    for started in jobs:
        if started.poll() is None:
            os.killpg(started.pid, signal.SIGKILL)
            started.communicate()


def newest(folder):
    return max((int(path.parent.name) for path in folder.glob("checkpoints/*/manifest.json")), default=0)


def until_there_is_one_after(step, started, folder):
    end = time.monotonic() + LIMIT
    while newest(folder) <= step:
        assert started.poll() is None, started.communicate()
        assert time.monotonic() < end, "no checkpoint"
        time.sleep(0.05)


def launcher_of(started):
    """The process that srun stands for, which Slurm signals: of this job's session, or started by it."""
    children = Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text().split()
    [launcher] = [int(child) for child in children]
    return launcher


@pytest.mark.few(0)
@pytest.mark.skipif(not Path(f"/proc/self/task/{os.getpid()}/children").exists(), reason="needs Linux' /proc")
@pytest.mark.timeout(300)
@pytest.mark.mpich
def test_a_job_that_is_stopped_is_queued_again_and_goes_on(job, tmp_path):
    folder, step = tmp_path / "runs" / "requeue", 0
    for turn in (1, 2):
        started = job()
        until_there_is_one_after(step, started, folder)
        os.kill(launcher_of(started), signal.SIGTERM)
        out, error = started.communicate(timeout=LIMIT)
        assert started.returncode == 143, error
        assert (tmp_path / "told").read_text() == "requeue 4711\n" * turn
        said = re.search(r"thinwire_cifar: error: stopped by SIGTERM after step (\d+)", error)
        assert (f"resumed runs/requeue at step {step}" in out) == (turn > 1), out
        step = int(said[1])
        assert newest(folder) == step
