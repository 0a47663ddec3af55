"""Signals by MPI: one receive from any source is always posted, on a communicator that carries nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mpi4py import MPI

from communicators.background.transport import SIGNAL_BYTES, PeerLost, SignalLine


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
    does not read waits here, and not without bound in its MPI.
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
