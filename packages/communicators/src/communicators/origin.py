"""Communicators for an mpi4py communicator, a torch process group, or one process alone."""

import logging
import os
import sys
from typing import Any

import torch.distributed as dist

from communicators.communicator import Communicator, check_connections, check_timeout
from communicators.worlds.alone import Alone

logger = logging.getLogger(__name__)

_LAUNCHERS = {
    "PMI_SIZE": "mpiexec",
    "OMPI_COMM_WORLD_SIZE": "mpiexec",
    "SLURM_STEP_NUM_TASKS": "srun",
    "WORLD_SIZE": "torchrun",
}


def as_communicator(
    comm: Any = None,
    *,
    timeout: float | None = None,
    patience: float | None = None,
    transport: str | None = None,
    store: Any = None,
    connections: int | None = None,
) -> Communicator:
    """A communicator for an mpi4py Comm, a torch ProcessGroup, a Communicator (returned as it is), or None.

    All ranks of a group call this together at its first use, because it is duplicated once. For a torch process group
    they do so again after it was set up anew in place, or a call has raised its communicator's failure: then it is
    another one. An mpi4py communicator is duplicated, by Dup(), to go on after a failure.

    Args:
        comm: None is the default process group if it is initialised, else COMM_WORLD if mpi4py.MPI is imported, else
            one rank.
        timeout: `Communicator.timeout` from now on, in seconds, alike on all ranks; the first use waits as long for the
            others. Default: the process group's own, else 300 s, or what was set before.
        patience: Seconds that the first use alone waits for the others, in place of `timeout`.
        transport: Way of data on a GPU, for a torch process group at its first use: "host" (default), through host
            memory, or "nccl", by a NCCL communicator of our own, where that is the group's backend for CUDA. Not yet
            run on a GPU.
        store: A `torch.distributed.Store` where the ranks of a torch process group meet, shared by all of them; for
            groups without one of their own, such as those written in Python. What we send does not go by the group:
            its ranks must only be able to connect to each other. Another store than before makes a new communicator.
        connections: TCP connections to each peer, alike on all ranks, for a torch process group at its first use;
            default 1, or what it was before. Long messages of a known length go in pieces over all of them: faster
            where one connection does not fill a long path that loses packets. Dense sums are ours then, not gloo's own.

    Raises:
        TypeError: `comm` is something else, a process group without a Store, a fake one, or one without this rank.
        RuntimeError: None, under a launcher of several ranks, with neither a process group nor mpi4py; or the launcher
            is of another MPI than mpi4py's, so that each rank would be alone.
        CollectiveError: Names the ranks that did not come to the first use, or have died since, and what to do.
    """
    made = _found(comm, timeout if patience is None else patience, transport, store, connections)
    if timeout is not None:
        made.timeout = timeout
    return made


def _found(
    comm: Any, patience: float | None, transport: str | None, store: Any, connections: int | None
) -> Communicator:
    if patience is not None:
        patience = check_timeout(patience)
    if transport not in (None, "host", "nccl"):
        raise ValueError(f"transport is {transport!r}, expected 'host' or 'nccl'")
    if connections is not None:
        check_connections(connections)
    if transport == "nccl" and connections is not None:
        raise ValueError("connections= is for data by TCP; of NCCL's own set NCCL_NSOCKS_PERTHREAD")
    if comm is None and dist.is_available() and dist.is_initialized():
        comm = dist.group.WORLD
    if dist.is_available() and comm is dist.GroupMember.NON_GROUP_MEMBER:
        raise TypeError(
            "this rank is not in that group: new_group() gives NON_GROUP_MEMBER to ranks that it leaves out; make this "
            "call on its members alone"
        )
    if dist.is_available() and isinstance(comm, dist.ProcessGroup):
        return _from_process_group(comm, patience, transport, store, connections)
    if transport == "nccl":
        raise ValueError('transport="nccl" is for a torch process group with NCCL for CUDA tensors, at its first use')
    if store is not None:
        raise TypeError("store= is for a torch process group: the ranks of others have met already")
    mpi = sys.modules.get("mpi4py.MPI")
    by_mpi = mpi is not None and (comm is None or isinstance(comm, mpi.Comm))
    if connections is not None and (by_mpi or isinstance(comm, Communicator)):
        raise TypeError(
            "connections= is for a torch process group, or an Elastic: MPI has settings of its own, and a Communicator "
            "is connected already"
        )
    if isinstance(comm, Communicator):
        return comm
    if comm is None and mpi is not None:
        if mpi.COMM_WORLD.Get_size() == 1:
            _refuse_torchrun()
        return _from_mpi(mpi.COMM_WORLD, mpi, patience)
    if comm is None:
        return _one_rank()
    if mpi is not None and isinstance(comm, mpi.Comm):
        return _from_mpi(comm, mpi, patience)
    hint = ": give mesh.get_group(name) of one dimension" if type(comm).__name__ == "DeviceMesh" else ""
    raise TypeError(
        "expected an mpi4py communicator, a torch process group, a Communicator or None, got "
        f"{type(comm).__name__}{hint}"
    )


def _from_process_group(
    group: dist.ProcessGroup, patience: float | None, transport: str | None, store: Any, connections: int | None
) -> Communicator:
    from torch._C._distributed_c10d import Store

    if store is not None and not isinstance(store, Store):
        raise TypeError(f"store is {type(store).__name__}, expected a torch.distributed.Store, or None")
    kind = type(group)
    if kind.size is not dist.ProcessGroup.size and kind.rank is dist.ProcessGroup.rank:
        raise TypeError(
            f"a {kind.__name__} says how many its ranks are, but not which this one is, as torchft's: all would be "
            f"rank {group.rank()}. Give the group that it wraps, as_communicator(group.parent), after each configure()"
        )
    if group.size() == 1:
        return Alone()
    from communicators.worlds.process_group import from_process_group

    return from_process_group(group, patience, transport, store, connections)


def _from_mpi(comm: Any, mpi: Any, patience: float | None) -> Communicator:
    if comm == mpi.COMM_NULL or comm.Is_inter():
        raise ValueError("expected an intracommunicator, got COMM_NULL or an intercommunicator")
    if comm.Get_size() == 1:
        if comm == mpi.COMM_WORLD:
            _refuse_another_mpi(mpi)
        return Alone()
    from communicators.worlds.mpi import from_mpi

    return from_mpi(comm, patience)


def _started() -> dict[str, int]:
    """Number of ranks that a launcher has started, by its variable, where it is more than one."""
    sizes = {variable: os.environ.get(variable, "1") for variable in _LAUNCHERS}
    return {variable: int(size) for variable, size in sizes.items() if size.isdigit() and int(size) > 1}


def _refuse_another_mpi(mpi: Any) -> None:
    """Raises RuntimeError for a world of one rank under an MPI launcher of several: each would train alone."""
    for variable, size in _started().items():
        if variable != "WORLD_SIZE":
            library = mpi.Get_library_version().partition("\n")[0].partition(",")[0].strip()
            raise RuntimeError(
                f"{_LAUNCHERS[variable]} started {size} ranks ({variable}), but mpi4py, with {library}, finds one: the "
                "launcher is of another MPI; start them by that MPI's own mpiexec, or with srun by the --mpi= that it "
                "speaks, or by torchrun, or install mpi4py for the launcher's MPI"
            )


def _refuse_torchrun() -> None:
    """Raises RuntimeError under torchrun without a process group, although mpi4py is imported."""
    if "WORLD_SIZE" in (started := _started()):
        raise _unreachable("WORLD_SIZE", started["WORLD_SIZE"])


def _unreachable(variable: str, size: int) -> RuntimeError:
    return RuntimeError(
        f"{_LAUNCHERS[variable]} started {size} ranks ({variable}), but none of them can reach the others: "
        "`from mpi4py import MPI` (mpiexec, srun) or `torch.distributed.init_process_group(...)` (torchrun) "
        "before as_communicator(None), or pass a communicator"
    )


def _one_rank() -> Communicator:
    for variable, size in _started().items():
        raise _unreachable(variable, size)
    logger.info("no process group is initialised and mpi4py.MPI is not imported: one rank, nothing is exchanged")
    return Alone()
