"""Signals by MPI: one receive from any source is always posted, on a communicator that carries nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mpi4py import MPI

from communicators.background.transport import SIGNAL_BYTES, PeerLost, SignalLine


@contextmanager
def reaching(peer: int) -> Iterator[None]:
    """PeerLost for what MPI says of a peer that has died: one that ends by itself waits in MPI for all others first."""
    try:
        yield
    except MPI.Exception as error:
        if error.Get_error_class() == MPI.ERR_TRUNCATE:  # a schedule's mistake
            raise
        raise PeerLost(peer, error, died=True) from error


class MPISignalLine(SignalLine):
    """comm: a duplicate of our own. abandon: keeps alive what MPI may still touch.

    A message is sent in synchronous mode, so that none is taken for sent which its receiver has not matched: what it
    does not read waits here, and not without bound in its MPI.
    """

    def __init__(self, comm: MPI.Comm, abandon: Callable[..., None]) -> None:
        self._comm, self._abandon = comm, abandon
        self._sending: dict[int, tuple[MPI.Request, bytes]] = {}
        self._room, self._status = bytearray(SIGNAL_BYTES), MPI.Status()
        self._receive = comm.Recv_init([self._room, MPI.BYTE], MPI.ANY_SOURCE)
        self._receive.Start()

    def send(self, peer: int, message: bytes) -> None:
        """See `SignalLine.send`."""
        with reaching(peer):
            self._sending[peer] = self._comm.Issend([message, MPI.BYTE], peer), message

    def sent(self, peer: int) -> bool:
        """See `SignalLine.sent`."""
        with reaching(peer):
            if peer in self._sending and self._sending[peer][0].Test():
                del self._sending[peer]
        return peer not in self._sending

    def received(self) -> list[tuple[int, bytes]]:
        """See `SignalLine.received`."""
        messages = []
        while self._receive.Test(self._status):
            messages.append((self._status.Get_source(), bytes(self._room[: self._status.Get_count(MPI.BYTE)])))
            self._receive.Start()
        return messages

    def close(self) -> None:
        """See `SignalLine.close`."""
        if self._sending:  # to ranks that have departed
            self._abandon(self._sending)
        self._receive.Cancel()
        self._receive.Wait()
        self._receive.Free()
