"""Communicators for torch process groups, whatever their backend: a gloo group of our own with the same ranks.

The Store, which one rank holds and which may not answer, is only needed to meet. CUDA payloads are staged through
pinned host memory, unless NCCL is asked for (see `nccl`).
"""

import os
import weakref
from contextlib import suppress
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.constants import default_pg_nccl_timeout, default_pg_timeout

from communicators.background.transport import Transport
from communicators.background.transport_communicator import TransportCommunicator
from communicators.communicator import TIMEOUT_SECONDS
from communicators.errors import CollectiveError
from communicators.worlds.gloo import GlooTransport
from communicators.worlds.meeting import REMEDY, Rendezvous, in_time, job_of, store_of
from communicators.worlds.nccl import NCCL, UntaggedTransport, uses_nccl

TORCH_TIMEOUTS = (default_pg_timeout, default_pg_nccl_timeout)

Generation = tuple[int, int, str]
_made: weakref.WeakKeyDictionary[Any, tuple[TransportCommunicator, Store | None, Generation]] = (
    weakref.WeakKeyDictionary()
)


def from_process_group(
    group: dist.ProcessGroup,
    patience: float | None = None,
    transport: str | None = None,
    store: Store | None = None,
    connections: int | None = None,
) -> TransportCommunicator:
    """Our communicator for a process group; made once for each. Collective over its ranks at the first use.

    store: where its ranks meet, default the group's own. Another store than before, a group that was set up anew, as
    after a rank was lost, and a communicator whose failure this rank has raised make a new communicator.

    Its `timeout` is that of the communicator before, else what the group was made with, TIMEOUT_SECONDS where that is
    torch's default.
    patience: seconds that the first use waits for the other ranks, default that `timeout`. transport: "nccl" for data
    on a GPU by NCCL; ValueError where the group does not use it, or is in use with another one already. connections: to
    each peer, likewise. CollectiveError where ranks of a failed communicator are gone, and the group is the same.
    """
    generation = _generation(group)
    made, met_by, met_as = _made.get(group, (None, None, None))
    before = made
    if made is not None and (met_as != generation or made.closed or (store is not None and store is not met_by)):
        made = None
    if made is not None and (reason := made.control.abort_reason) is not None:
        if made.gone and store is None:
            raise CollectiveError(f"{reason}; {REMEDY}")
        if made.control.told:  # a rank between calls would meet others in another call than theirs
            made = None
    if made is not None and transport not in (None, made.transport.name):
        raise ValueError(f"transport={transport!r}, but this process group is in use with {made.transport.name!r}")
    if made is not None and connections not in (None, made.transport.connections):
        raise ValueError(
            f"connections={connections}, but this process group is in use with {made.transport.connections}: give it "
            "at the first use, before any optimizer, hook or call of this group"
        )
    if made is None:
        timeout = timeout_of(group) if before is None else before.timeout
        connections = connections or (1 if before is None else before.transport.connections)
        waits = timeout if patience is None else patience
        made = TransportCommunicator(
            in_time(lambda: _connected(group, waits, transport, store, connections), group.rank(), waits)
        )
        made.timeout = timeout
        _made[group] = made, store, generation
    return made


def _generation(group: dist.ProcessGroup) -> Generation:
    """Mark that changes where a group is set up anew in place: by its owner, or by torch, whose handle tells."""
    handle = ""
    with suppress(RuntimeError):  # a group of several backends, or of none
        if getattr(group, "supports_reconfigure", False):  # since torch 2.14
            handle = cast(Any, group).get_reconfigure_handle()
    return group.rank(), group.size(), handle


def _connected(
    group: dist.ProcessGroup, patience: float, transport: str | None, store: Store | None, connections: int
) -> Transport:
    if transport == "nccl" and not uses_nccl(group):
        raise ValueError('transport="nccl", but the process group does not use NCCL for CUDA tensors: leave it out')
    there = Rendezvous.of(group, store_of(group), job_of(os.environ)) if store is None else Rendezvous.of(group, store)
    if transport == "nccl":
        return UntaggedTransport(there, NCCL.of, patience)
    return GlooTransport(there._replace(connections=connections), patience)


def timeout_of(group: dist.ProcessGroup) -> float:
    """Seconds that the group was given; TIMEOUT_SECONDS where nobody gave it any."""
    for kind in ("cpu", "cuda"):
        try:
            given: timedelta = group._get_backend(torch.device(kind)).options._timeout
        except (AttributeError, RuntimeError):  # no backend for this kind, or one without settings
            continue
        return TIMEOUT_SECONDS if given in TORCH_TIMEOUTS else given.total_seconds()
    return TIMEOUT_SECONDS
