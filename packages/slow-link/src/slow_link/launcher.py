"""Starts ranks on a link: by mpiexec, by torchrun, or as processes that find each other through a Store."""

from __future__ import annotations

import shutil
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from slow_link.ranks import end, run_together

MOST_RANKS = 64


class Launcher(ABC):
    """Starts ranks that are `milliseconds` apart, each behind a full duplex port of `mbit_per_second`.

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

    def __init__(self, *, ranks: int, mbit_per_second: float, milliseconds: float) -> None:
        if not 1 <= ranks <= MOST_RANKS:
            raise ValueError(f"expected 1 … {MOST_RANKS} ranks, got {ranks}")
        if mbit_per_second <= 0 or milliseconds < 0:
            raise ValueError(f"expected Mbit/s > 0 and ms >= 0, got {mbit_per_second} and {milliseconds}")
        self.ranks = ranks
        self.alpha, self.beta = milliseconds * 1e-3, 8e-6 / mbit_per_second

    @abstractmethod
    def describe(self) -> str:
        """Describes the link to readers of numbers measured on it."""

    @abstractmethod
    def prefix(self, rank: int) -> list[str]:
        """Words before a rank's command that start it in its place on the link."""

    @abstractmethod
    def mpi_environment(self) -> Mapping[str, str]:
        """Environment variables that make MPI use the link and nothing else."""

    @abstractmethod
    def store(self) -> Mapping[str, str]:
        """Environment variables that let env:// find rank 0 and make gloo use the link."""

    def watch(self) -> None:  # noqa: B027 - there may be nothing to watch
        """Raises an error if the link has broken; called while ranks run."""

    def end(self, processes: Sequence[subprocess.Popen[bytes]], *, launchers: bool) -> None:
        """Ends the processes started here, and any that ranks have left behind on the link.

        Args:
            processes: All that were started, ended or not.
            launchers: Whether they are mpiexec or torchrun, rather than the ranks.
        """
        end(processes)

    def mpiexec(
        self,
        command: Sequence[str],
        *,
        timeout: float,
        capture: bool = True,
        mpiexec: Sequence[str] = (),
        section: Sequence[str] = (),
    ) -> subprocess.CompletedProcess[str]:
        """Runs the command as MPI ranks under a single mpiexec.

        Args:
            command: Command of every rank.
            timeout: Time limit in seconds.
            capture: Whether to keep the output for the result instead of showing it.
            mpiexec: Launcher and its options; default: the mpiexec beside this Python, else the one on the PATH.
            section: Options of every rank.

        Raises:
            subprocess.TimeoutExpired: The command took longer, and was ended.
        """
        words = list(mpiexec) or [str(_mpiexec())]
        for rank in range(self.ranks):
            words += [*([":"] if rank else []), "-n", "1", *section, *self.prefix(rank), *command]
        [done] = self._run([words], [self.mpi_environment()], timeout, capture, launchers=True)
        return done

    def processes(
        self, command: Sequence[str], *, timeout: float, capture: bool = True
    ) -> list[subprocess.CompletedProcess[str]]:
        """Runs the command as one process per rank; `dist.init_process_group("gloo")` needs no other arguments there.

        Results are in rank order. Once a rank has failed, the others get ten more seconds.

        Args:
            command: Command of every rank.
            timeout: Time limit in seconds.
            capture: Whether to keep the output for the results instead of showing it.

        Raises:
            subprocess.TimeoutExpired: The command took longer, and was ended.
        """
        store = {**self.store(), "WORLD_SIZE": str(self.ranks)}
        commands = [[*self.prefix(rank), *command] for rank in range(self.ranks)]
        environments = [{**store, "RANK": str(rank)} for rank in range(self.ranks)]
        return self._run(commands, environments, timeout, capture, launchers=False)

    def torchrun(
        self, command: Sequence[str], *, timeout: float, capture: bool = True, torchrun: Sequence[str] = ()
    ) -> list[subprocess.CompletedProcess[str]]:
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
    ) -> list[subprocess.CompletedProcess[str]]:
        ending = partial(self.end, launchers=launchers)
        return run_together(commands, environments, timeout=timeout, capture=capture, watch=self.watch, ending=ending)


def _mpiexec() -> Path:
    """Path of the mpiexec beside this Python, else of the one on the PATH."""
    beside = Path(sys.executable).parent / "mpiexec"
    found = beside if beside.exists() else shutil.which("mpiexec")
    if found is None:
        raise FileNotFoundError("no mpiexec beside this Python or on the PATH: `pip install mpich`")
    return Path(found)
