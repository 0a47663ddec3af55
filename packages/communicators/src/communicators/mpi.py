"""MPI by mpi4py: point-to-point with buffers, on communicators of our own.

Data and letters travel on two duplicates of the user's communicator, so that nothing of ours can match a message of
his. CUDA payloads are staged through pinned host memory.
"""

from __future__ import annotations

import time
from functools import cache
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor

from communicators.call import Call
from communicators.communicator import TIMEOUT_SECONDS
from communicators.control import LETTER_BYTES
from communicators.schedule import Received, Round
from communicators.staging import host_empty, to_host
from communicators.transport import Pending, Transport
from communicators.transport_communicator import TransportCommunicator

DUP_SECONDS = TIMEOUT_SECONDS
CLOSE_SECONDS = 1.0
"""So long the letters of a communicator that is closed may take to be sent."""


def from_mpi(comm: MPI.Comm) -> TransportCommunicator:
    """Our communicator for an mpi4py one; made once and kept as its attribute. Collective at its first use."""
    cached = comm.Get_attr(_keyval())
    if isinstance(cached, TransportCommunicator) and not cached.closed:
        return cached
    made = TransportCommunicator(MPITransport(comm))
    comm.Set_attr(_keyval(), made)
    return made


class MPITransport(Transport):
    """Two duplicates of an MPI communicator: one for payloads, one for letters."""

    def __init__(self, comm: MPI.Comm) -> None:
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self.device = torch.device("cpu")
        self.threaded = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self._data, self._letters = _duplicate(comm), _duplicate(comm)
        self._written: list[tuple[MPI.Request, bytes]] = []
        self._abandoned: list[object] = []

    def post(self, call: Call, action: Round, device: torch.device) -> Pending:
        """See `Transport.post`."""
        buffers = {peer: host_empty(capacity, device) for peer, capacity in action.recvs.items()}
        receives = {
            peer: self._data.Irecv(_bytes_of(buffer), peer, call.incoming_tag(peer)) for peer, buffer in buffers.items()
        }
        payloads = {peer: to_host(payload) for peer, payload in action.sends.items()}
        sends = {}
        for peer, payload in payloads.items():
            call.stamp(payload)
            sends[peer] = self._data.Isend(_bytes_of(payload), peer, call.outgoing_tag(peer))
        return _PendingRound(self, call, receives, sends, buffers, payloads, device)

    def write(self, peer: int, letter: bytes) -> None:
        """See `Transport.write`."""
        self._written = [(request, kept) for request, kept in self._written if not request.Test()]
        self._written.append((self._letters.Isend([letter, MPI.BYTE], peer), letter))

    def read(self) -> list[bytes]:
        """See `Transport.read`."""
        letters = []
        status = MPI.Status()
        while self._letters.Iprobe(status=status):
            buffer = bytearray(LETTER_BYTES)
            self._letters.Recv([buffer, MPI.BYTE], status.Get_source(), status=status)
            letters.append(bytes(buffer[: status.Get_count(MPI.BYTE)]))
        return letters

    def can_sum(self, tensor: Tensor) -> bool:
        """See `Transport.can_sum`: CPU tensors of the dtypes that MPI knows."""
        return tensor.device.type == "cpu" and tensor.dtype in _SUMMED

    def post_sum(self, tensor: Tensor) -> Pending:
        """See `Transport.post_sum`. Non-blocking, so that a rank that never comes is noticed."""
        return _PendingSum(self, self._data.Iallreduce(MPI.IN_PLACE, tensor.numpy(), MPI.SUM), tensor)

    def closing(self) -> bool:
        """See `Transport.closing`."""
        return not MPI.Is_finalized()

    def close(self) -> None:
        """See `Transport.close`. MPI has a few thousand communicators at most."""
        end = time.monotonic() + CLOSE_SECONDS
        while not MPI.Is_finalized() and not self._abandoned and time.monotonic() < end:
            if all(request.Test() for request, _ in self._written):
                self._data.Free()
                self._letters.Free()
                return
            time.sleep(1e-3)

    def abandon(self, *what: object) -> None:
        """Keeps buffers alive that MPI may still touch."""
        self._abandoned.append(what)


class _PendingRound(Pending):
    """Requests by peer. Over TCP a send ends with the receiver's receipt, one α after the message has come."""

    def __init__(
        self,
        transport: MPITransport,
        call: Call,
        receives: dict[int, MPI.Request],
        sends: dict[int, MPI.Request],
        buffers: dict[int, Tensor],
        payloads: dict[int, Tensor],
        device: torch.device,
    ) -> None:
        self._transport, self._call, self._receives, self._sends = transport, call, receives, sends
        self._buffers, self._payloads, self._device = buffers, payloads, device
        self._requests = list(receives.values()), list(sends.values())  # Testall puts nulls where they end
        self._statuses = [MPI.Status() for _ in receives]
        self._arrived = False

    def arrived(self) -> bool:
        self._arrived = self._arrived or bool(MPI.Request.Testall(self._requests[0], self._statuses))
        return self._arrived

    def done(self) -> bool:
        return self.arrived() and bool(MPI.Request.Testall(self._requests[1]))

    def received(self) -> Received:
        received = {}
        for (peer, buffer), status in zip(self._buffers.items(), self._statuses, strict=False):
            payload = buffer[: status.Get_count(MPI.BYTE)]
            self._call.accept(peer, payload, buffer.numel())
            received[peer] = payload.to(self._device)
        return received

    def missing(self) -> list[int]:
        requests = [*self._receives.items(), *self._sends.items()]
        return sorted({peer for peer, request in requests if request and not request.Get_status()})

    def cancel(self) -> None:
        for request in self._receives.values():
            if request:
                request.Cancel()
        self._transport.abandon(self._requests, self._buffers, self._payloads)


class _PendingSum(Pending):
    def __init__(self, transport: MPITransport, request: MPI.Request, tensor: Tensor) -> None:
        self._transport, self._request, self._tensor = transport, request, tensor

    def done(self) -> bool:
        return bool(self._request.Test())

    def received(self) -> Received:
        return {}

    def missing(self) -> list[int]:
        return [peer for peer in range(self._transport.size) if peer != self._transport.rank]

    def cancel(self) -> None:
        self._transport.abandon(self._request, self._tensor)


_SUMMED = {torch.float32, torch.float64, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8}


@cache
def _keyval() -> int:
    return MPI.Comm.Create_keyval()


def _duplicate(comm: MPI.Comm) -> MPI.Comm:
    """A duplicate, or an error where the others do not come for one."""
    duplicate, request = comm.Idup()
    end = time.monotonic() + DUP_SECONDS
    while not request.Test():
        if time.monotonic() > end:
            raise RuntimeError(
                f"rank {comm.Get_rank()} waited {DUP_SECONDS:g} s for the other {comm.Get_size() - 1} ranks to make "
                "a communicator; every rank of it must call as_communicator"
            )
        time.sleep(1e-3)
    return duplicate


def _bytes_of(buffer: Tensor) -> list[Any]:
    return [buffer.numpy(), MPI.BYTE]
