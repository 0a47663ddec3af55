"""Rank and world of this process, read from the environment before MPI or torch is loaded; joining the others."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from thinwire_trainer.errors import RunError

if TYPE_CHECKING:
    from communicators import Communicator


# launcher: variables of rank, world size and local rank. The first launcher whose rank and size are set is taken:
# `mpiexec` inside a Slurm job sets both its own and Slurm's. A Slurm batch script itself has SLURM_PROCID but no
# SLURM_STEP_NUM_TASKS: it is not a worker.
LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    "mpiexec": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
}


MPI_VARIABLES = ("PMI", "I_MPI_PMI_LIBRARY")  # prefixes: of what srun with an MPI plugin sets, and what Intel MPI needs
BY_TORCHRUN = "TORCHELASTIC_RUN_ID"  # a script that sets RANK itself may end before what it started in the background

MEETING = timedelta(seconds=120)
"""Longest wait of ranks of srun for each other at the start."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Rank, world size and rank on this machine, as the launcher says; alone where there is none."""

    launcher: str | None = None
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    watches: bool = False  # whether this process is to end when the one that started it does
    meeting: str | None = None  # host:port where ranks of srun without MPI find each other

    @property
    def uses_mpi(self) -> bool:
        """Whether MPI carries the messages (otherwise torch.distributed does, or nothing has to)."""
        return self.launcher not in (None, "torchrun") and self.meeting is None


def placement(environment: Mapping[str, str]) -> Placement:
    """The placement that `environment` (normally `os.environ`) describes."""
    for launcher, (rank, size, local_rank) in LAUNCHERS.items():
        if rank in environment and size in environment:
            # srun with PMI sets PMI_RANK but not the wheel's local rank.
            local = environment.get(local_rank, environment.get("SLURM_LOCALID", "0"))
            return Placement(
                launcher=launcher,
                rank=int(environment[rank]),
                size=int(environment[size]),
                local_rank=int(local),
                watches=launcher != "torchrun" or BY_TORCHRUN in environment,
                meeting=_meeting(environment) if launcher == "srun" else None,
            )
    return Placement()


def _meeting(environment: Mapping[str, str]) -> str | None:
    """Address on the first node of a Slurm step, with a port of the step's own; None where MPI carries the messages.

    MASTER_ADDR and MASTER_PORT, where they are set, say otherwise.
    """
    if any(name.startswith(MPI_VARIABLES) for name in environment):
        return None
    nodes = re.sub(r"\[([^],-]+)[^]]*\]", r"\1", environment.get("SLURM_STEP_NODELIST", "localhost"))  # node[1-3],gpu7
    step = zlib.crc32(f"{environment.get('SLURM_JOB_ID')}.{environment.get('SLURM_STEP_ID')}".encode())
    host = environment.get("MASTER_ADDR", nodes.partition(",")[0])
    return f"{host}:{environment.get('MASTER_PORT', 20000 + step % 10000)}"


def first_complaint(complaint: str, place: Placement) -> str:
    """The complaint of the lowest rank that has one, or "".

    Under MPI all ranks ask each other, before torch is imported: a rank that left alone would keep the others
    waiting in MPI's own start for ever. torchrun ends the others by itself.
    """
    if not place.uses_mpi:
        return complaint
    return next((text for text in _mpi_world(place).allgather(complaint) if text), "")


@contextmanager
def joined(
    place: Placement, backend: str = "gloo", *, elastic: str | None = None, at_least: int | None = None
) -> Iterator[Communicator]:
    """This rank's communicator: MPI's under an MPI launcher, torch.distributed's under torchrun and srun, else of one.

    backend: torch.distributed's. By "gloo" what a GPU sends is staged through the host; by "nccl" it goes directly.
    elastic: where ranks that come and go meet instead, see `Options`.
    """
    from communicators import Elastic, as_communicator
    from torch import distributed
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    if elastic is not None:
        yield Elastic(elastic or None, at_least=at_least or 1)
    elif place.uses_mpi:
        yield as_communicator(_mpi_world(place))
    elif place.launcher is not None and not (place.meeting and place.size == 1 and backend == "gloo"):
        direct = backend == "nccl"
        transport = "cpu:gloo,cuda:nccl" if direct else "gloo"
        try:
            if place.meeting:
                host, _, port = place.meeting.rpartition(":")
                store = TCPStore(host, int(port), place.size, place.rank == 0, MEETING)
                distributed.init_process_group(transport, store=store, rank=place.rank, world_size=place.size)
            else:
                distributed.init_process_group(transport, "env://", rank=place.rank, world_size=place.size)
        except RuntimeError as error:
            raise RunError(_unmet(str(error), os.environ, place.meeting)) from error
        yield as_communicator(None, transport="nccl" if direct else None)
        distributed.destroy_process_group()
    else:
        yield as_communicator(None)


def _unmet(error: str, environment: Mapping[str, str], meeting: str | None) -> str:
    """Reason, in a line, why torch's ranks do not meet. meeting: the place of those whose launcher names none."""
    at = f"{environment.get('MASTER_ADDR', '?')}:{environment.get('MASTER_PORT', '?')} (MASTER_ADDR, MASTER_PORT)"
    at = meeting or at
    if "Unable to find address for" in error:
        wanted = environment.get("GLOO_SOCKET_IFNAME")
        return f"GLOO_SOCKET_IFNAME is {wanted!r}, no interface of this host with an address: `ip addr` lists them"
    if "connectFullMesh" in error:
        return (
            "the ranks have met, but cannot connect to each other: open all ports between the hosts, and name the "
            "interface that joins them in GLOO_SOCKET_IFNAME (`ip addr` lists them)"
        )
    if "EADDRINUSE" in error:
        return f"{at} is taken by another program or job" + ": take another MASTER_PORT" * (not meeting)
    return (
        f"the ranks do not meet at {at}: {error.splitlines()[0]}; `python -m thinwire doctor`, started alike, says more"
    )


def _mpi_world(place: Placement) -> Any:
    """mpi4py's COMM_WORLD; RunError if it is not the world that the launcher says it started."""
    try:
        import mpi4py

        mpi4py.rc.initialize, mpi4py.rc.finalize = False, True
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # no mpi4py, or no MPI library
        raise RunError(
            f"started by {place.launcher}, but MPI cannot be used ({str(error).partition(chr(10))[0]}): "
            "pip install mpi4py mpich, or take the cluster's own MPI"
        ) from None
    if not MPI.Is_initialized():
        library = " ".join(MPI.Get_library_version().partition("\n")[0].split())
        if place.launcher == "mpirun" and "MPICH" in library:  # it would abort the process in words of its own
            raise RunError(
                f"{place.launcher} of Open MPI started {place.size} ranks, but mpi4py has {library}: start them by its "
                "own mpiexec, or install mpi4py for Open MPI"
            )
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    if MPI.COMM_WORLD.size != place.size:
        raise RunError(
            f"{place.launcher} started {place.size} ranks, mpi4py sees {MPI.COMM_WORLD.size}: "
            f"it uses another MPI library than this {place.launcher}; install both from one source"
        )
    return MPI.COMM_WORLD
