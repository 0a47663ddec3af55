"""MPI by mpi4py: point-to-point with buffers, on communicators of our own.

Data and control messages travel on two duplicates of the user's communicator, so that nothing of ours can match a
message of the user's. CUDA payloads are staged through pinned host memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from communicators.background.call import Call
from communicators.background.transport import (
    CONTROL_BYTES,
    SIGNAL_BYTES,
    PeerLost,
    Pending,
    PendingSum,
    SignalLine,
    Transport,
)
from communicators.background.transport_communicator import TransportCommunicator
from communicators.communicator import TIMEOUT_SECONDS
from communicators.errors import CollectiveError
from communicators.schedule import Payload, Received, Round


@contextmanager
def reaching(peer: int) -> Iterator[None]:
    """Raises PeerLost where MPI reports a dead peer: one that ends by itself first waits in MPI for all others."""
    try:
        yield
    except MPI.Exception as error:
        if error.Get_error_class() == MPI.ERR_TRUNCATE:  # a schedule's mistake
            raise
        raise PeerLost(peer, error, died=True) from error


class MPISignalLine(SignalLine):
    """Signal line over MPI. comm: a duplicate of our own. abandon: keeps alive what MPI may still touch.

    A message is sent in synchronous mode, so that none counts as sent before its receiver has matched it: what a peer
    does not read waits here, and not without bound in its MPI. A receive is always posted: where a probe finds what has
    come, a signal takes twice as long.
    """

    def __init__(self, comm: MPI.Comm, abandon: Callable[..., None]) -> None:
        self._comm, self._abandon = comm, abandon
        self._sending: dict[int, tuple[MPI.Request, bytes]] = {}
        self._room, self._status = bytearray(SIGNAL_BYTES), MPI.Status()
        self._receive = comm.Recv_init([self._room, MPI.BYTE], MPI.ANY_SOURCE)
        self._receive.Start()

    def send(self, peer: int, message: bytes) -> None:
        with reaching(peer):
            self._sending[peer] = self._comm.Issend([message, MPI.BYTE], peer), message

    def sent(self, peer: int) -> bool:
        with reaching(peer):
            if peer in self._sending and self._sending[peer][0].Test():
                del self._sending[peer]
        return peer not in self._sending

    def received(self) -> list[tuple[int, bytes]]:
        messages = []
        while self._receive.Test(self._status):
            messages.append((self._status.Get_source(), bytes(self._room[: self._status.Get_count(MPI.BYTE)])))
            self._receive.Start()
        return messages

    def close(self) -> None:
        if self._sending:  # to ranks that have departed
            self._abandon(self._sending)
        self._receive.Cancel()
        self._receive.Wait()
        self._receive.Free()


FIRST_CALL_POLL_SECONDS = 1e-3
CLOSE_SECONDS = 10.0
"""Longest time that the control messages of closed communicators may take to be sent."""


def from_mpi(comm: MPI.Comm, patience: float | None = None) -> TransportCommunicator:
    """Our communicator for an mpi4py one; made once and kept as its attribute. Collective at its first use.

    patience: seconds that the first use waits for the other ranks, default TIMEOUT_SECONDS. Raises CollectiveError that
    names those that did not come; so does every later use, because the others would meet this one half-way. Likewise
    after a failure that this rank has raised, with what to do.
    """
    cached = comm.Get_attr(_keyval())
    if isinstance(cached, CollectiveError):
        raise CollectiveError(str(cached))
    if isinstance(cached, TransportCommunicator) and not cached.closed:
        if cached.failure is not None and cached.control.told:
            raise CollectiveError(
                f"{cached.failure}; that has ended all calls with this mpi4py communicator: go on with another one, by "
                "Dup() on every rank"
            )
        return cached
    try:
        made = TransportCommunicator(MPITransport(comm, TIMEOUT_SECONDS if patience is None else patience))
    except CollectiveError as error:
        comm.Set_attr(_keyval(), error)
        raise
    comm.Set_attr(_keyval(), made)
    return made


class MPITransport(Transport):
    """Two duplicates of an MPI communicator: one for payloads, one for control messages."""

    summed = (torch.float32, torch.float64, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
    _in_vain = False  # whether the last one to be closed waited for nothing: a peer reads from all of them or none

    def __init__(self, comm: MPI.Comm, patience: float = TIMEOUT_SECONDS) -> None:
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self.device = torch.device("cpu")
        self.threaded = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        end = time.monotonic() + patience
        _wait_for_all(comm, end, patience)
        self._data, self._control = _duplicate(comm, end), _duplicate(comm, end)
        self.group = str(comm.Get_group().Translate_ranks(None, MPI.COMM_WORLD.Get_group()))
        self._written: list[tuple[MPI.Request, int, bytes]] = []
        self._abandoned: list[object] = []

    def post(self, call: Call, action: Round, device: torch.device) -> Pending:
        pinned = device.type == "cuda"
        buffers = {peer: Payload.on_host(nbytes, pinned=pinned) for peer, nbytes in action.recvs.items()}
        receives = {
            peer: self._data.Irecv(_bytes_of(buffer), peer, call.tag(peer, call.heard))
            for peer, buffer in buffers.items()
        }
        payloads = {peer: payload.to_host() for peer, payload in action.sends.items()}
        sends = {}
        for peer, payload in payloads.items():
            call.stamp(payload)
            with reaching(peer):
                sends[peer] = self._data.Isend(_bytes_of(payload), peer, call.tag(peer, call.sent))
        return _PendingRound(self, call, device, receives, sends, buffers, payloads)

    def send_control(self, peer: int, message: bytes) -> None:
        self._unsent()
        self._written.append((self._control.Isend([message, MPI.BYTE], peer), peer, message))

    def read_control(self) -> list[bytes]:
        messages = []
        status = MPI.Status()
        while self._control.Iprobe(status=status):
            buffer = bytearray(CONTROL_BYTES)
            self._control.Recv([buffer, MPI.BYTE], status.Get_source(), status=status)
            messages.append(bytes(buffer[: status.Get_count(MPI.BYTE)]))
        return messages

    def post_sum(self, tensor: Tensor) -> Pending:
        """Posts MPI's own sum; non-blocking, so that a rank that never comes is noticed."""
        request = self._data.Iallreduce(MPI.IN_PLACE, tensor.numpy(), MPI.SUM)
        return PendingSum(self, lambda: bool(request.Test()), lambda: self.abandon(request, tensor))

    def duplicate(self, patience: float) -> MPITransport:
        """Another transport, made of the communicator for control messages, where no collective is in flight."""
        self.duplicates += 1
        made = MPITransport(self._control, patience)
        made.group = f"{self.group}, duplicate {self.duplicates}"
        return made

    def signal_line(self) -> MPISignalLine:
        """Line for signals on the communicator that otherwise carries payloads."""
        return MPISignalLine(self._data, self.abandon)

    def closing(self) -> bool:
        return not MPI.Is_finalized()

    def close(self) -> None:
        """Frees both duplicates once control messages are sent: MPI has a few thousand communicators at most.

        At its end MPI sends nothing more, so that is waited for.
        """
        end = time.monotonic() + (0.0 if MPITransport._in_vain else CLOSE_SECONDS)
        while self._unsent() and time.monotonic() < end:
            time.sleep(1e-3)
        MPITransport._in_vain = self._unsent()
        if not MPITransport._in_vain and not self._abandoned and not MPI.Is_finalized():
            self._data.Free()
            self._control.Free()

    def _unsent(self) -> bool:
        """Whether control messages are still under way."""
        if MPI.Is_finalized():
            return False
        written, self._written = self._written, []
        for request, peer, message in written:
            with suppress(PeerLost), reaching(peer):
                if not request.Test():
                    self._written.append((request, peer, message))
        return bool(self._written)

    def abandon(self, *what: object) -> None:
        """Keeps buffers alive that MPI may still touch."""
        self._abandoned.append(what)


@dataclass(eq=False)
class _PendingRound(Pending):
    """Round in flight, by peer. Over TCP a send ends with the receiver's receipt, one α after the message has come."""

    transport: MPITransport
    call: Call
    device: torch.device
    receives: dict[int, MPI.Request]
    sends: dict[int, MPI.Request]
    buffers: dict[int, Payload]
    payloads: dict[int, Payload]

    def come(self) -> list[int]:
        return [peer for peer, request in self.receives.items() if not request or request.Get_status()]

    def arrived(self) -> bool:
        return all(self._over(peer, request) for peer, request in self.receives.items())

    def done(self) -> bool:
        return self.arrived() and all(self._over(peer, request) for peer, request in self.sends.items())

    def _over(self, peer: int, request: MPI.Request) -> bool:
        """Whether a message has come or gone, one by one: Testall would not say whose fails. Test puts a null then."""
        with reaching(peer):
            return not request or bool(request.Test())

    def received(self) -> Received:
        return {peer: self.call.take(peer, buffer, self.device) for peer, buffer in self.buffers.items()}

    def missing(self) -> list[int]:
        requests = [*self.receives.items(), *self.sends.items()]
        return sorted({peer for peer, request in requests if request and not request.Get_status()})

    def cancel(self) -> None:
        for request in self.receives.values():
            if request:
                request.Cancel()
        self.transport.abandon(self.receives, self.sends, self.buffers, self.payloads)


_abandoned: list[object] = []
"""Buffers of first calls that failed, which MPI may still touch."""


@cache
def _keyval() -> int:
    return MPI.Comm.Create_keyval(delete_fn=_freed)


def _freed(comm: MPI.Comm, keyval: int, made: object) -> None:
    """Closes our communicator where the user frees theirs, which is collective: so is closing ours."""
    del comm, keyval
    if isinstance(made, TransportCommunicator) and not made.closed and made.control.abort_reason is None:
        made.close()


def _wait_for_all(comm: MPI.Comm, end: float, patience: float) -> None:
    """Returns when all ranks have come.

    A collective, because the user might receive a message on that communicator. Every rank sends to every other one, so
    where some do not come, what has arrived tells who has; MPI calls that undefined, so it is only named.
    """
    here, ones = np.zeros(comm.Get_size(), dtype=np.int32), np.ones(comm.Get_size(), dtype=np.int32)
    counts, displs = np.ones_like(here), np.arange(len(here), dtype=np.int32)
    request = comm.Ialltoallv([ones, (counts, displs), MPI.INT32_T], [here, (counts, displs), MPI.INT32_T])
    if not _ends_in_time(request, end, here, ones, counts, displs):
        missing = [rank for rank in np.flatnonzero(here == 0).tolist() if rank != comm.Get_rank()]
        raise CollectiveError(
            f"timed out after {patience:g} s: rank {comm.Get_rank()} waits for ranks {missing} in the first call "
            "with this MPI communicator, which all of its ranks must make, and in one order where there are several"
        )


def _duplicate(comm: MPI.Comm, end: float) -> MPI.Comm:
    """A duplicate, which all ranks are about to make."""
    try:
        duplicate, request = comm.Idup()
        if not _ends_in_time(request, end, duplicate):
            raise CollectiveError(f"timed out: rank {comm.Get_rank()} waits for the others to make a communicator")
    except MPI.Exception as error:
        raise RuntimeError(
            "MPI gives no further communicator: close() those that are not needed any more, on every rank, or Free() "
            f"the mpi4py communicators that they were made for, which closes them ({error})"
        ) from error
    return duplicate


def _ends_in_time(request: MPI.Request, end: float, *touched: object) -> bool:
    """Whether a request is over by then; else keeps alive what it may still touch."""
    while not request.Test():
        if time.monotonic() > end:
            _abandoned.append((request, *touched))
            return False
        time.sleep(FIRST_CALL_POLL_SECONDS)
    return True


def _bytes_of(payload: Payload) -> list[Any]:
    return [payload.memory.numpy(), MPI.BYTE]
