"""Joining the other ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.errors import RunError
from trainer.placement import Placement

if TYPE_CHECKING:
    from communicators import Communicator


def first_complaint(complaint: str, place: Placement) -> str:
    """The complaint of the lowest rank that has one, or "".

    Under MPI all ranks ask each other, before torch is imported: a rank that left alone would keep the others
    waiting in MPI's own start for ever.
    """
    if not place.uses_mpi:
        return complaint
    return next((text for text in _mpi_world(place).allgather(complaint) if text), "")


def connect(place: Placement) -> Communicator:
    """This rank's communicator: MPI's under an MPI launcher, torch.distributed's under torchrun, else of one rank."""
    from communicators import as_communicator

    if place.uses_mpi:
        _mpi_world(place)
    elif place.launcher == "torchrun":
        import torch

        torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return as_communicator(None)
