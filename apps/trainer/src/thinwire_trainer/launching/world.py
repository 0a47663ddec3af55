"""Joining the other ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from thinwire_trainer.errors import RunError
from thinwire_trainer.launching.placement import Placement

if TYPE_CHECKING:
    from communicators import Communicator


def first_complaint(complaint: str, place: Placement) -> str:
    """The complaint of the lowest rank that has one, or "".

    Under MPI all ranks ask each other, before torch is imported: a rank that left alone would keep the others
    waiting in MPI's own start for ever. torchrun ends the others by itself.
    """
    if not place.uses_mpi:
        return complaint
    return next((text for text in _mpi_world(place).allgather(complaint) if text), "")


@contextmanager
def joined(place: Placement, backend: str = "gloo") -> Iterator[Communicator]:
    """This rank's communicator: MPI's under an MPI launcher, torch.distributed's under torchrun, else of one rank.

    backend: torchrun's. By "gloo" what a GPU sends is staged through the host's memory; by "nccl" it goes directly.
    """
    from communicators import as_communicator
    from torch import distributed

    if place.uses_mpi:
        yield as_communicator(_mpi_world(place))
    elif place.launcher == "torchrun":
        direct = backend == "nccl"
        distributed.init_process_group("cpu:gloo,cuda:nccl" if direct else "gloo")
        yield as_communicator(None, transport="nccl" if direct else None)
        distributed.destroy_process_group()
    else:
        yield as_communicator(None)


def _mpi_world(place: Placement) -> Any:
    """mpi4py's COMM_WORLD; RunError if it is not the world that the launcher says it started."""
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise RunError(f"started by {place.launcher}, but MPI cannot be used ({error}): pip install mpi4py") from None
    if MPI.COMM_WORLD.size != place.size:
        raise RunError(
            f"{place.launcher} started {place.size} ranks, mpi4py sees {MPI.COMM_WORLD.size}: "
            f"it uses another MPI library than this {place.launcher}; install both from one source"
        )
    return MPI.COMM_WORLD
