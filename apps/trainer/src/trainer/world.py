"""Joining the other ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainer.errors import RunError
from trainer.placement import Placement

if TYPE_CHECKING:
    from communicators import Communicator


def first_complaint(complaint: str, place: Placement) -> str:
    """The complaint of the lowest rank that has one, or "".

    Under MPI all ranks ask each other, before torch is imported: a rank that left alone would keep the others
    waiting in MPI's own start for ever.
    """
    if place.launcher == "torchrun":
        return "torchrun's process groups carry no messages here yet: start the workers with mpiexec or --nworkers"
    if not place.uses_mpi:
        return complaint
    return next((text for text in _mpi_world(place).allgather(complaint) if text), "")


def connect(place: Placement) -> Communicator:
    """This rank's communicator: MPI's under an MPI launcher, else one of one rank."""
    from communicators import as_communicator

    if place.uses_mpi:
        return as_communicator(_mpi_world(place))
    return as_communicator(None)


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
