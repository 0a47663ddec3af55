"""Stopping a run, or what started it: no rank is left, one line says so, and --resume goes on at once.

Where a signal asks for it the ranks agree on a step, and leave a checkpoint of that.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

BESIDE = Path(sys.executable).parent
FLAGS = "--max-epochs 500 --lr-schedule constant --checkpoint-every 4 --keep 1"
TRAIN = ["-m", "cifar", *FLAGS.split()]
STARTERS = {
    "by itself": [sys.executable, *TRAIN],
    "its own workers": [sys.executable, *TRAIN, "--nworkers", "2"],
    "mpiexec": [str(BESIDE / "mpiexec"), "-n", "2", sys.executable, *TRAIN],
    "torchrun": [str(BESIDE / "torchrun"), "--standalone", "--nproc-per-node", "2", *TRAIN],
}
MARK = "THINWIRE_TEST_RUN"
LIMIT = 120  # seconds; two other starts beside a run take long on a busy machine
pytestmark = [pytest.mark.mpi, pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs Linux' /proc")]


class Job:
    """A run, started as users do, with all processes that belong to it."""

    def __init__(self, how: str, folder: Path, *flags: str) -> None:
        self.mark, self.folder, self.others = uuid.uuid4().hex, folder, list[Job]()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", MARK: self.mark}
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        command = [*STARTERS[how], "--output", str(folder), *flags]
        self.starter = subprocess.Popen(command, env=environment, start_new_session=True, **pipes)

    def left(self) -> list[int]:
        """Its processes that still run."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if f"{MARK}={self.mark}".encode() in path.read_bytes():
                    found.append(int(path.parent.name))
            except OSError:  # ended meanwhile, or nothing but an exit code
                continue
        return found

    def until(self, holds, what: str) -> None:
        end = time.monotonic() + LIMIT
        while not holds():
            assert time.monotonic() < end, f"not within {LIMIT} s: {what}"
            time.sleep(0.05)

    def newest(self) -> str:
        return max((path.parent.name for path in self.folder.glob("checkpoints/*/manifest.json")), default="")

    def beside(self, how: str, *flags: str) -> Job:
        """Another one in the same folder."""
        self.others.append(Job(how, self.folder, *flags))
        return self.others[-1]

    def close(self) -> None:
        for process in self.left():
            os.kill(process, signal.SIGKILL)
        self.starter.communicate()
        for other in self.others:
            other.close()


@pytest.fixture
def job(tmp_path):
    jobs = []

    def start(how, *flags):
        jobs.append(Job(how, tmp_path / "run", *flags))
        return jobs[-1]

    yield start
    for started in jobs:
        started.close()


def stopped_by(job, number):
    """All ranks end, with one line, the signal's exit code, and a checkpoint of the step that the line names.

    A terminal's ctrl-C is for the starter and for all that it has started in its group.
    """
    (os.killpg if number == signal.SIGINT else os.kill)(job.starter.pid, number)
    _, error = job.starter.communicate(timeout=LIMIT)
    assert job.starter.returncode == 128 + number
    line = r"thinwire_cifar: error: stopped by (\w+) after step (\d+), with a checkpoint: --resume goes on\n"
    said = re.fullmatch(line, _without_torchruns(error))
    assert said, error
    assert said[1] == signal.Signals(number).name
    assert int(job.newest()) == int(said[2])
    job.until(lambda: not job.left(), "the end of all ranks")


def _without_torchruns(error):
    """torchrun reports what became of each rank, too."""
    return "".join(line for line in error.splitlines(keepends=True) if line.startswith("thinwire_cifar:"))


def killed(job, number):
    """What started the ranks cannot say anything any more; they end all the same."""
    job.starter.send_signal(number)
    job.until(lambda: not job.left(), "the end of all ranks")


def two_others_are_refused(job, number):
    """While the run goes on, which is then interrupted."""
    for how, flags in (("its own workers", ["--overwrite"]), ("by itself", ["--resume"])):
        second = job.beside(how, "--algorithm", "gtopk", *flags)
        _, error = second.starter.communicate(timeout=LIMIT)
        assert second.starter.returncode == 1
        assert re.fullmatch(r"thinwire_cifar: error: [^\n]+/run is in use by process \d+ on [^\n]+\n", error), error
    reached = job.newest()
    job.until(lambda: job.newest() > reached, "another checkpoint")
    stopped_by(job, number)


# Every start goes on with what the one before it has left. What starts the ranks is killed in each of three ways, once
# with eager SGD: how they end is no matter of the algorithm, but how they agree on a step to stop at is.
CHAINS = {
    ("one rank", "gtopk"): [("by itself", stopped_by, signal.SIGINT), ("by itself", stopped_by, signal.SIGTERM)],
    ("two ranks", "gtopk"): [
        ("torchrun", killed, signal.SIGKILL),
        ("its own workers", two_others_are_refused, signal.SIGINT),
        ("mpiexec", stopped_by, signal.SIGTERM),
        ("its own workers", killed, signal.SIGKILL),
        ("mpiexec", killed, signal.SIGKILL),
    ],
    ("two ranks", "eager-majority"): [
        ("mpiexec", killed, signal.SIGKILL),
        ("its own workers", stopped_by, signal.SIGTERM),
        ("mpiexec", stopped_by, signal.SIGINT),
    ],
}


@pytest.mark.few(1)
@pytest.mark.timeout(600)  # a launch takes long on a busy machine
@pytest.mark.parametrize(("ranks", "algorithm"), CHAINS)
@pytest.mark.mpich
def test_however_a_run_ends_no_rank_is_left_and_the_next_one_goes_on_with_it_at_once(job, ranks, algorithm):
    reached = ""
    for turn, (how, end, number) in enumerate(CHAINS[ranks, algorithm]):
        run = job(how, "--algorithm", algorithm, *(["--resume"] if turn else []))
        run.until(lambda run=run, reached=reached: run.newest() > reached, f"run {turn}, {how}: another checkpoint")
        end(run, number)
        reached = run.newest()


def test_a_thousand_workers_are_asked_about():
    command = [sys.executable, "-m", "cifar", "--nworkers", str(1 + 8 * len(os.sched_getaffinity(0)))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 2
    assert re.fullmatch(
        r"thinwire_cifar: error: --nworkers \d+ is more than [^\n]+--oversubscribe[^\n]+\n", done.stderr
    )
