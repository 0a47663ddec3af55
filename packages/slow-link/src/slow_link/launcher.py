"""Starting ranks on a link: by mpiexec, or as processes that find each other through a Store."""

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
    """Ranks that are `milliseconds` apart, each behind a full duplex port of `mbit_per_second`.

    Args:
        ranks: How many.
        mbit_per_second: Of each rank's port, in each direction.
        milliseconds: From any rank to any other.

    Attributes:
        ranks: How many.
        alpha: Seconds per message.
        beta: Seconds per byte, headers left out.

    Raises:
        ValueError: No such link can be.
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
        """What this is, for whoever reads its numbers."""

    @abstractmethod
    def prefix(self, rank: int) -> list[str]:
        """Words that start a rank's command where it belongs."""

    @abstractmethod
    def mpi_environment(self) -> Mapping[str, str]:
        """What MPI needs to use the link and nothing else."""

    @abstractmethod
    def store(self) -> Mapping[str, str]:
        """Where env:// finds rank 0, and what gloo needs to use the link."""

    def watch(self) -> None:  # noqa: B027 - there may be nothing to watch
        """Raises if the link has broken; called while ranks run."""

    def end(self, processes: Sequence[subprocess.Popen[bytes]], *, launchers: bool) -> None:
        """Ends processes that were started here, and what ranks have left behind on the link.

        Args:
            processes: Those that were started, ended or not.
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
        """Runs the command as MPI ranks, by one mpiexec.

        Args:
            command: What every rank runs.
            timeout: Seconds that it may take.
            capture: Whether what it prints is kept for the result, rather than shown.
            mpiexec: The launcher and its options, if not the one beside this Python.
            section: Options of every rank.

        Raises:
            subprocess.TimeoutExpired: It took longer, and was ended.
        """
        words = list(mpiexec) or [str(_mpiexec())]
        for rank in range(self.ranks):
            words += [*([":"] if rank else []), "-n", "1", *section, *self.prefix(rank), *command]
        [done] = self._run([words], [self.mpi_environment()], timeout, capture, launchers=True)
        return done

    def processes(
        self, command: Sequence[str], *, timeout: float, capture: bool = True
    ) -> list[subprocess.CompletedProcess[str]]:
        """Runs the command as a process a rank, in rank order, for `dist.init_process_group("gloo")` without more.

        Once a rank has failed, the others have ten seconds more.

        Args:
            command: What every rank runs.
            timeout: Seconds that it may take.
            capture: Whether what it prints is kept for the results, rather than shown.

        Raises:
            subprocess.TimeoutExpired: It took longer, and was ended.
        """
        store = {**self.store(), "WORLD_SIZE": str(self.ranks)}
        commands = [[*self.prefix(rank), *command] for rank in range(self.ranks)]
        environments = [{**store, "RANK": str(rank)} for rank in range(self.ranks)]
        return self._run(commands, environments, timeout, capture, launchers=False)

    def torchrun(
        self, command: Sequence[str], *, timeout: float, capture: bool = True, torchrun: Sequence[str] = ()
    ) -> list[subprocess.CompletedProcess[str]]:
        """Runs a script and its arguments by torchrun, every rank as a node of its own; otherwise as `processes`.

        Args:
            command: What every rank runs.
            timeout: Seconds that it may take.
            capture: Whether what it prints is kept for the results, rather than shown.
            torchrun: The words that start it, with options that do not say where nodes are.

        Raises:
            subprocess.TimeoutExpired: It took longer, and was ended.
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
    """The launcher beside this Python, else the one on the PATH."""
    beside = Path(sys.executable).parent / "mpiexec"
    found = beside if beside.exists() else shutil.which("mpiexec")
    if found is None:
        raise FileNotFoundError("no mpiexec beside this Python or on the PATH: `pip install mpich`")
    return Path(found)
