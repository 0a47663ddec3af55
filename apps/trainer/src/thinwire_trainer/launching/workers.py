"""Ranks of one program: those that a launcher has started, or workers of our own, started here and tidied up after."""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from thinwire_trainer.errors import RunError
from thinwire_trainer.launching.ending import StopRequest, complain, exit_code, stoppable
from thinwire_trainer.launching.placement import Placement, placement

WORKERS_A_CORE = 8  # more is rather a slip of the finger: each takes a few hundred megabytes and its share of a core
GRACE = 25.0  # seconds that the workers have to end, after a signal: longer than their own patience
STARTING = 5.0  # seconds in which workers may miss a signal, and have little to save: so many to end it is, then
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
KILLED = {*range(4, 65), *range(131, 193)} - {128 + signal.SIGTERM}  # a signal's number, Open MPI's from 128 on
"""Codes of mpiexec that no worker ends with by itself. MPICH joins the bits of several: the signal is not known."""
ABORTED = 255  # code of MPICH's mpiexec after a second ctrl-C


def start_workers(module: str, argv: Sequence[str], workers: int, *, oversubscribe: bool = False) -> int:
    """Run `python -m MODULE ARGV` on so many ranks under mpiexec, to the end; returns its exit code.

    They end with this process: SIGINT and SIGTERM are handed on and, on Linux, mpiexec gets a SIGTERM when this
    process is killed. Elsewhere they would go on after a SIGKILL.
    """
    if not oversubscribe:
        refuse_oversubscription(workers)
    command = [find_mpiexec(), "-n", str(workers), sys.executable, "-m", module, *argv]
    process: subprocess.Popen[bytes] | None = None
    waiting: list[int] = []  # signals that came while mpiexec was being started
    sent: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        del frame
        waiting.append(number)
        if process is not None:
            hand_on(process)

    def hand_on(process: subprocess.Popen[bytes]) -> None:
        with suppress(IndexError):  # of a signal amid this, which hands on all that waits
            while True:
                first, number = not sent, waiting.pop()
                sent.append(number)
                if first:
                    grace = GRACE if time.time() - began > STARTING else STARTING
                    patience = threading.Timer(grace, process.kill)  # then the workers notice by themselves
                    patience.daemon = True
                    patience.start()
                process.send_signal(number)

    began = time.time()
    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        process = subprocess.Popen(
            command,
            env=worker_environment(),
            stdin=subprocess.DEVNULL,
            preexec_fn=_dying_with_parent(),
            start_new_session=True,  # a terminal's ctrl-C comes from us alone: by a second one mpiexec aborts
        )
        hand_on(process)
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if code:
        remove_left_behind(began)
    forced = code < 0 or code in KILLED
    if sent and (forced or code in (*sent, ABORTED)):
        stopped = code if code in sent else sent[-1]
        complain(module, f"stopped by {signal.Signals(stopped).name}")
        return 128 + stopped
    if forced:
        killed = "a worker was killed, which the system does where memory runs out, and mpiexec ended with code"
        what = f"mpiexec was ended by signal {-code}" if code < 0 else f"{killed} {code}"
        complain(module, f"{what}; --resume goes on from the last checkpoint")
    return 128 - code if code < 0 else code  # as a shell reports death by a signal


def refuse_oversubscription(workers: int) -> None:
    """RunError if they are more than the cores that this process may use can bear."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if workers > WORKERS_A_CORE * cores:
        raise RunError(
            f"--nworkers {workers} is more than {WORKERS_A_CORE} workers for each of {cores} cores: "
            f"give --oversubscribe if it is meant, or fewer workers"
        )


def _dying_with_parent() -> Callable[[], None] | None:
    """Callback of a child before it becomes another program, so that it gets SIGTERM when we die; Linux has that."""
    if sys.platform != "linux":
        return None
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()  # looked up here: after a fork as little as possible is done

    def ask() -> None:
        prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        if os.getppid() != parent:  # it has died already
            os._exit(1)

    return ask


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


SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - looked at, not written to
PATTERN = "mpich_shm_*"


def remove_left_behind(since: float, folder: Path = SHARED_MEMORY) -> list[Path]:
    """Deletes this user's files that were made from `since` on (a time.time()) and that no process has mapped.

    For after a launch of ours that was ended by force; returns what was deleted. Nothing where there is no /proc.
    """
    found = [path for path in folder.glob(PATTERN) if _is_ours(path, since)] if Path("/proc/self/maps").exists() else []
    mapped = _mapped_files() if found else ""
    left = [path for path in found if str(path) not in mapped]
    for path in left:
        path.unlink(missing_ok=True)
    return left


def _is_ours(path: Path, since: float) -> bool:
    try:
        status = path.stat()
    except OSError:
        return False
    return status.st_uid == os.getuid() and status.st_mtime >= since - 1.0


def _mapped_files() -> str:
    """Paths that all processes have mapped, as far as this one may see them."""
    texts = []
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            texts.append(maps.read_text())
        except OSError:  # it has ended, or is another user's
            continue
    return "".join(texts)


WRONG_USAGE = 2


@dataclass(frozen=True, kw_only=True)
class Job:
    """A command line's request.

    Attributes:
        workers: How many to start where no launcher has started any.
        oversubscribe: They may be more than the cores can bear.
        work: One rank's part.
        afterwards: Called once workers that were started here have ended well.
    """

    workers: int
    work: Callable[[], None]
    oversubscribe: bool = False
    afterwards: Callable[[], None] = lambda: None


def run_job(module: str, argv: Sequence[str], asked: Callable[[Placement, StopRequest], Job]) -> int:
    """Does this process's part, to its exit code: starts the workers and waits for them, or is one of the ranks.

    Args:
        module: Of `python -m MODULE ARGV`, and the name in messages.
        argv: The command line, for the workers.
        asked: Makes a job of it. Its RunError is a wrong command line: the same on all ranks under MPI, and rank 0 says
            it; elsewhere the first of each machine.

    Returns:
        That of the workers or of `exit_code`; 2 for a wrong command line.
    """
    place = placement(os.environ)
    with stoppable(place, program=module) as request:
        try:
            job = asked(place, request)
            if place.launcher is None and job.workers > 1:
                code = start_workers(module, argv, job.workers, oversubscribe=job.oversubscribe)
                if code == 0:
                    job.afterwards()
                return code
        except RunError as error:
            if (place.rank if place.uses_mpi else place.local_rank) == 0:
                print(f"{module}: error: {error}", file=sys.stderr, flush=True)
            return WRONG_USAGE
        return exit_code(job.work, place, program=module)
