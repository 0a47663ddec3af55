"""Starts ranks side by side, by mpiexec, by torchrun or as plain processes; none of them is left afterwards."""

import contextlib
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from subprocess import DEVNULL, CompletedProcess, Popen, TimeoutExpired
from typing import IO, Self

MOST_RANKS = 64
POLL_SECONDS = 0.02
FAILURE_SECONDS = 10.0
"""Time that the others get after one rank has failed: long enough to say why they fail too."""

TERMINATION_SECONDS = 5.0


class Launcher:
    """Starts ranks that are `milliseconds` apart, each behind a full duplex port of `mbit_per_second`.

    By itself it starts them over TCP on this machine's loopback device, which costs nothing but software: α and β
    describe what subclasses emulate.

    Args:
        ranks: Number of ranks.
        mbit_per_second: Rate of each rank's port, in each direction.
        milliseconds: One-way delay between any two ranks.

    Attributes:
        ranks: Number of ranks.
        alpha: Seconds per message.
        beta: Seconds per byte, headers left out.

    Raises:
        ValueError: An argument is out of range.
    """

    device = "lo"
    """Network device of every rank."""

    def __init__(self, *, ranks: int, mbit_per_second: float = float("inf"), milliseconds: float = 0.0) -> None:
        if not 1 <= ranks <= MOST_RANKS:
            raise ValueError(f"expected 1 … {MOST_RANKS} ranks, got {ranks}")
        if not (mbit_per_second > 0 and 0 <= milliseconds < math.inf):
            raise ValueError(f"expected Mbit/s > 0 and ms >= 0, got {mbit_per_second} and {milliseconds}")
        self.ranks = ranks
        self.alpha, self.beta = milliseconds * 1e-3, 8e-6 / mbit_per_second
        self._exits = ExitStack()  # what undoes the link

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.close()

    def describe(self) -> str:
        """Describes the link to readers of numbers measured on it."""
        return "TCP over loopback"

    def prefix(self, rank: int) -> list[str]:
        """Words before a rank's command that start it in its place on the link."""
        return []

    def environment(self) -> Mapping[str, str]:
        """Variables of every rank on this link, however it is started."""
        return {}

    def mpi_environment(self) -> Mapping[str, str]:
        """MPICH's variables for TCP on the link alone; without NOLOCAL it would see one host and use shared memory."""
        tcp = {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp", "FI_TCP_IFACE": self.device}
        return {"MPIR_CVAR_NOLOCAL": "1", **tcp}

    def first_address(self) -> tuple[str, int]:
        """Address of rank 0, and a port that is free there."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            host, port = free.getsockname()
        return host, port

    def store(self) -> Mapping[str, str]:
        """Environment variables that let env:// find rank 0 and make gloo use the link."""
        host, port = self.first_address()
        return {"MASTER_ADDR": host, "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": self.device}

    def watch(self) -> None:
        """Raises an error if the link is not there; called before and while ranks run."""

    def end(self, processes: Sequence[Popen[bytes]], *, launchers: bool) -> None:
        """Ends the processes started here, and any that ranks have left behind on the link.

        Args:
            processes: All that were started, ended or not.
            launchers: Whether they are mpiexec or torchrun, rather than the ranks.
        """
        for process in processes:
            _signal(process, signal.SIGTERM)  # so that a launcher ends its ranks
        last = time.monotonic() + TERMINATION_SECONDS
        for process in processes:
            with contextlib.suppress(TimeoutExpired):
                process.wait(max(0.0, last - time.monotonic()))
            _signal(process, signal.SIGKILL)
            process.wait()

    def mpiexec(
        self,
        command: Sequence[str],
        *,
        timeout: float,
        capture: bool = True,
        mpiexec: Sequence[str] = (),
        section: Sequence[str] = (),
    ) -> CompletedProcess[str]:
        """Runs the command as MPI ranks under a single mpiexec.

        Args:
            command: Command of every rank.
            timeout: Time limit in seconds.
            capture: Whether to keep the output for the result instead of showing it.
            mpiexec: Launcher and its options; default: the mpiexec beside this Python, else the one on the PATH.
            section: Options of every rank.

        Raises:
            FileNotFoundError, ValueError: There is no mpiexec, or Open MPI's.
            subprocess.TimeoutExpired: The command took longer, and was ended.
        """
        words = list(mpiexec) or [find_mpiexec()]
        for rank in range(self.ranks):
            words += [*([":"] if rank else []), "-n", "1", *section, *self.prefix(rank), *command]
        [done] = self._run([words], [self.mpi_environment()], timeout, capture, launchers=True)
        return done

    def processes(self, command: Sequence[str], *, timeout: float, capture: bool = True) -> list[CompletedProcess[str]]:
        """Runs the command as one process per rank; `dist.init_process_group("gloo")` needs no other arguments there.

        Each is alone on its machine, as under `torchrun`: its LOCAL_RANK is 0.

        Args:
            command: Command of every rank.
            timeout: Time limit in seconds; once a rank has failed, the others get ten more.
            capture: Whether to keep the output for the results, which are in rank order, instead of showing it.

        Raises:
            subprocess.TimeoutExpired: The command took longer, and was ended.
        """
        store = {**self.store(), "WORLD_SIZE": str(self.ranks), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        commands = [[*self.prefix(rank), *command] for rank in range(self.ranks)]
        environments = [{**store, "RANK": str(rank)} for rank in range(self.ranks)]
        return self._run(commands, environments, timeout, capture, launchers=False)

    def torchrun(
        self, command: Sequence[str], *, timeout: float, capture: bool = True, torchrun: Sequence[str] = ()
    ) -> list[CompletedProcess[str]]:
        """Runs a script and its arguments under torchrun, every rank as a node of its own; otherwise like `processes`.

        Args:
            command: Script and arguments of every rank.
            timeout: Time limit in seconds.
            capture: Whether to keep the output for the results instead of showing it.
            torchrun: Words that start torchrun, with any options but those that place the nodes.

        Raises:
            subprocess.TimeoutExpired: The command took longer, and was ended.
        """
        store = self.store()
        words = [*(torchrun or [sys.executable, "-m", "torch.distributed.run"]), "--nproc-per-node=1"]
        words += [f"--nnodes={self.ranks}", f"--master-addr={store['MASTER_ADDR']}"]
        words += [f"--master-port={store['MASTER_PORT']}"]
        commands = [[*self.prefix(rank), *words, f"--node-rank={rank}", *command] for rank in range(self.ranks)]
        return self._run(commands, [store] * self.ranks, timeout, capture, launchers=True)

    def _run(
        self,
        commands: list[list[str]],
        environments: Sequence[Mapping[str, str]],
        timeout: float,
        capture: bool,
        *,
        launchers: bool,
    ) -> list[CompletedProcess[str]]:
        """Runs commands side by side, each with additions to the environment; returns their results in order."""
        self.watch()
        processes: list[Popen[bytes]] = []
        with ExitStack() as files:
            kept = [[files.enter_context(tempfile.TemporaryFile()) for _ in range(2 * capture)] for _ in commands]
            try:
                for command, environment, outputs in zip(commands, environments, kept, strict=True):
                    out, err = outputs or (None, None)
                    own = {**os.environ, **self.environment(), **environment}
                    started = Popen(command, stdin=DEVNULL, stdout=out, stderr=err, env=own, start_new_session=True)
                    processes.append(started)
                in_time = self._wait(processes, timeout)
            finally:
                self.end(processes, launchers=launchers)
            texts: list[list[str | None]] = [[_text(file) for file in outputs] or [None, None] for outputs in kept]
        if not in_time:
            told = ["".join(filter(None, parts)) for parts in zip(*texts, strict=True)]
            raise TimeoutExpired(commands[0], timeout, *told)
        return [
            CompletedProcess(process.args, process.returncode, *each)
            for process, each in zip(processes, texts, strict=True)
        ]

    def _wait(self, processes: Sequence[Popen[bytes]], timeout: float) -> bool:
        """Waits until all have ended, or one failed and the others had their time; False if time ran out first."""
        last, failed = time.monotonic() + timeout, False
        while None in (codes := [process.poll() for process in processes]):
            self.watch()
            if any(codes) and not failed:
                failed = True
                last = min(last, time.monotonic() + FAILURE_SECONDS)
            if time.monotonic() > last:
                return failed
            time.sleep(POLL_SECONDS)
        return True


def find_mpiexec(word: str = "mpiexec") -> str:
    """Path of MPICH's launcher of this name beside this Python, else on the PATH.

    Raises:
        FileNotFoundError: There is none.
        ValueError: It is Open MPI's, which names the variables that keep ranks on the link differently.
    """
    beside = Path(sys.executable).parent / word
    found = str(beside) if beside.exists() else shutil.which(word)
    if found is None:
        raise FileNotFoundError(f"no {word} beside this Python or on the PATH: `pip install mpich`")
    said = subprocess.run([found, "--version"], capture_output=True, text=True).stdout
    if "Open MPI" in said or "OpenRTE" in said:
        raise ValueError(f"{found} is Open MPI's, which is not kept on the link: MPICH's is (`pip install mpich`)")
    return found


def _signal(process: Popen[bytes], number: signal.Signals) -> None:
    """Signals a process's whole session while it runs; afterwards its number may belong to another process."""
    if process.poll() is None:
        os.killpg(process.pid, number)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
