"""From what the user has to a communicator."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

import torch.distributed as dist

from communicators.alone import Alone
from communicators.communicator import Communicator

logger = logging.getLogger(__name__)

_LAUNCHERS = {
    "PMI_SIZE": "mpiexec",
    "OMPI_COMM_WORLD_SIZE": "mpiexec",
    "SLURM_STEP_NUM_TASKS": "srun",
    "WORLD_SIZE": "torchrun",
}


def as_communicator(comm: Any = None) -> Communicator:
    """A communicator for an mpi4py Comm, a torch ProcessGroup, a Communicator (returned as it is), or None.

    None: the default process group if it is initialised, else COMM_WORLD if mpi4py.MPI is imported, else one rank.
    All ranks of a group call this together at its first use, because it is duplicated once.

    Raises TypeError for anything else, RuntimeError for None under a launcher of several ranks with neither.
    """
    if isinstance(comm, Communicator):
        return comm
    if comm is None and dist.is_available() and dist.is_initialized():
        comm = dist.group.WORLD
    if dist.is_available() and isinstance(comm, dist.ProcessGroup):
        return _from_process_group(comm)
    mpi = sys.modules.get("mpi4py.MPI")
    if comm is None:
        return _world(mpi) if mpi is not None else _one_rank()
    if mpi is not None and isinstance(comm, mpi.Comm):
        return _from_mpi(comm, mpi)
    raise TypeError(
        f"expected an mpi4py communicator, a torch process group, a Communicator or None, got {type(comm).__name__}"
    )


def _world(mpi: Any) -> Communicator:
    return _from_mpi(mpi.COMM_WORLD, mpi)


def _from_process_group(group: dist.ProcessGroup) -> Communicator:
    if group.size() == 1:
        return Alone()
    from communicators.process_group import from_process_group

    return from_process_group(group)


def _from_mpi(comm: Any, mpi: Any) -> Communicator:
    if comm == mpi.COMM_NULL or comm.Is_inter():
        raise ValueError("expected an intracommunicator, got COMM_NULL or an intercommunicator")
    if comm.Get_size() == 1:
        return Alone()
    from communicators.mpi import from_mpi

    return from_mpi(comm)


def _one_rank() -> Communicator:
    for variable, launcher in _LAUNCHERS.items():
        size = os.environ.get(variable, "1")
        if size.isdigit() and int(size) > 1:
            raise RuntimeError(
                f"{launcher} started {size} ranks ({variable}), but none of them can reach the others: "
                "`from mpi4py import MPI` (mpiexec, srun) or `torch.distributed.init_process_group(...)` (torchrun) "
                "before as_communicator(None), or pass a communicator"
            )
    logger.info("no process group is initialised and mpi4py.MPI is not imported: one rank, nothing is exchanged")
    return Alone()
