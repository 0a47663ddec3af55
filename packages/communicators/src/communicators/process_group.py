"""torch.distributed by point-to-point, on a gloo group of our own with the user's ranks.

Letters travel through the group's Store, by a client of our own. CUDA payloads are staged through pinned host memory,
unless the user's backend for them is NCCL (see `nccl`).
"""

from __future__ import annotations

import weakref
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions, PrefixStore, ProcessGroupGloo, Store
from torch.distributed.constants import default_pg_nccl_timeout, default_pg_timeout

from communicators.call import TAG_BITS, Call
from communicators.communicator import TIMEOUT_SECONDS
from communicators.nccl import nccl_of
from communicators.schedule import Received, Round
from communicators.staging import host_empty, to_host
from communicators.stores import meet, place_for, reconnected, store_of
from communicators.transport import PeerLost, Pending, Transport
from communicators.transport_communicator import TransportCommunicator
from communicators.untagged import UntaggedTransport
from communicators.waiters import WAIT, Wait, Waiters

WATCH_TAG = 1 << TAG_BITS
STORE_SECONDS = 5.0
TORCH_TIMEOUTS = (default_pg_timeout, default_pg_nccl_timeout)

_made: weakref.WeakKeyDictionary[Any, TransportCommunicator] = weakref.WeakKeyDictionary()


def from_process_group(group: dist.ProcessGroup) -> TransportCommunicator:
    """Our communicator for a process group; made once for each. Collective over its ranks at the first use.

    Its `timeout` is what the group was made with, TIMEOUT_SECONDS where that is torch's default.
    """
    made = _made.get(group)
    if made is None or made.closed:
        place, timeout = place_for(group), timeout_of(group)
        tagged = ProcessGroupTransport(group, place, timeout)
        line = nccl_of(group, place)
        made = TransportCommunicator(tagged if line is None else UntaggedTransport(tagged, line))
        made.timeout = timeout
        _made[group] = made
    return made


def timeout_of(group: dist.ProcessGroup) -> float:
    """Seconds that the group was given; TIMEOUT_SECONDS where nobody gave it any."""
    for kind in ("cpu", "cuda"):
        try:
            given: timedelta = group._get_backend(torch.device(kind)).options._timeout
        except (AttributeError, RuntimeError):  # no backend for this kind, or one without settings
            continue
        return TIMEOUT_SECONDS if given in TORCH_TIMEOUTS else given.total_seconds()
    return TIMEOUT_SECONDS


class ProcessGroupTransport(Transport):
    """A gloo group for payloads, a Store for letters."""

    threaded = True
    goodbye_seconds = 2.0  # the Store may live in a process that has ended

    def __init__(self, group: dist.ProcessGroup, place: str, timeout: float = TIMEOUT_SECONDS) -> None:
        self.rank, self.size = group.rank(), group.size()
        self.device = torch.device("cpu")
        # Not dist.new_group: its names count a rank's groups, so ranks that are in other groups would never meet.
        own = PrefixStore(place, reconnected(group))
        meet(own, self.rank, self.size, timeout)
        self._data: Any = ProcessGroupGloo(PrefixStore(place, store_of(group)), self.rank, self.size, WAIT)
        self._letters = _Mailbox(own, self.rank)
        self._waiters = Waiters()
        self._watches: dict[int, Wait] = {}  # by peer
        weakref.finalize(self, _end, self._waiters, self._watches, timeout=1.0).atexit = False  # of a destroyed group

    def post(self, call: Call, action: Round, device: torch.device) -> Pending:
        """See `Transport.post`."""
        buffers = {peer: host_empty(capacity, device) for peer, capacity in action.recvs.items()}
        receives = {
            peer: self._waiters.wait_for(self._data.recv([buffer], peer, call.incoming_tag(peer)))
            for peer, buffer in buffers.items()
        }
        sends = {}
        for peer, payload in action.sends.items():
            host = to_host(payload)
            call.stamp(host)
            sends[peer] = self._waiters.wait_for(self._data.send([host], peer, call.outgoing_tag(peer)))
        return _PendingRound(call, receives, sends, buffers, device)

    def can_sum(self, tensor: Tensor) -> bool:
        """See `Transport.can_sum`: CPU tensors of the dtypes that gloo knows."""
        return tensor.device.type == "cpu" and tensor.dtype in _SUMMED

    def post_sum(self, tensor: Tensor) -> Pending:
        """See `Transport.post_sum`. gloo aborts the process if ranks' sizes differ: they have agreed on them here."""
        return _PendingSum(self._waiters.wait_for(self._data.allreduce([tensor], AllreduceOptions())), self)

    def nap(self, seconds: float) -> None:
        """See `Transport.nap`: until a waiter has something."""
        self._waiters.news.wait(seconds)
        self._waiters.news.clear()

    def write(self, peer: int, letter: bytes) -> None:
        """See `Transport.write`."""
        self._letters.write(peer, letter)

    def read(self) -> list[bytes]:
        """See `Transport.read`."""
        return self._letters.read()

    def lost(self) -> PeerLost | None:
        """See `Transport.lost`: by a receive from each peer of what nobody ever sends; posted the first time."""
        if not self._watches:
            for peer in range(self.size):
                if peer != self.rank:
                    buffer = host_empty(1, self.device)
                    self._watches[peer] = self._waiters.wait_for(self._data.recv([buffer], peer, WATCH_TAG))
        errors = ((peer, wait.error) for peer, wait in self._watches.items())
        return next((PeerLost(peer, error) for peer, error in errors if error is not None), None)

    def closing(self) -> bool:
        """See `Transport.closing`."""
        return self._letters.alive

    def close(self) -> None:
        """See `Transport.close`."""
        _end(self._waiters, self._watches, timeout=1.0)


class _Mailbox:
    """Letters as numbered keys of a Store; one that cannot be reached any more has none."""

    def __init__(self, store: Store, rank: int) -> None:
        store.set_timeout(timedelta(seconds=STORE_SECONDS))
        self._store, self._rank = PrefixStore("letters", store), rank
        self._next = 1
        self.alive = True

    def write(self, peer: int, letter: bytes) -> None:
        try:
            number = self._store.add(f"{peer}/written", 1)
            self._store.set(f"{peer}/{number}", letter.decode())
        except RuntimeError:
            self.alive = False

    def read(self) -> list[bytes]:
        letters = []
        try:
            while self.alive and self._store.check([f"{self._rank}/{self._next}"]):
                key = f"{self._rank}/{self._next}"
                letters.append(self._store.get(key))
                self._store.delete_key(key)
                self._next += 1
        except RuntimeError:
            self.alive = False
        return letters


class _PendingRound(Pending):
    def __init__(
        self,
        call: Call,
        receives: dict[int, Wait],
        sends: dict[int, Wait],
        buffers: dict[int, torch.Tensor],
        device: torch.device,
    ) -> None:
        self._call, self._buffers, self._device = call, buffers, device
        self._receives, self._waits = receives, [*receives.items(), *sends.items()]

    def arrived(self) -> bool:
        self._raise_lost()
        return all(wait.done for wait in self._receives.values())

    def done(self) -> bool:
        self._raise_lost()
        return all(wait.done for _, wait in self._waits)

    def _raise_lost(self) -> None:
        for peer, wait in self._waits:
            if wait.error is not None:
                raise PeerLost(peer, wait.error)

    def received(self) -> Received:
        received = {}
        for peer, buffer in self._buffers.items():
            payload = buffer[: self._call.stamped_nbytes(buffer)]  # gloo does not say how much has come
            self._call.accept(peer, payload, buffer.numel())
            received[peer] = payload.to(self._device)
        return received

    def missing(self) -> list[int]:
        return sorted({peer for peer, wait in self._waits if not wait.done or wait.error is not None})

    def cancel(self) -> None:
        for _, wait in self._waits:
            wait.give_up()


class _PendingSum(Pending):
    def __init__(self, wait: Wait, transport: ProcessGroupTransport) -> None:
        self._wait, self._transport = wait, transport

    def done(self) -> bool:
        if self._wait.error is not None:
            raise self._wait.error  # gloo does not say which rank it lost
        return self._wait.done

    def received(self) -> Received:
        return {}

    def missing(self) -> list[int]:
        return [peer for peer in range(self._transport.size) if peer != self._transport.rank]

    def cancel(self) -> None:
        self._wait.give_up()


def _end(waiters: Waiters, watches: dict[int, Wait], timeout: float) -> None:
    """Lets the threads go: one that still waited when the interpreter ends would abort it."""
    for wait in watches.values():
        wait.give_up()
    waiters.close(timeout)


_SUMMED = {torch.float32, torch.float64, torch.int8, torch.int32, torch.int64, torch.uint8}
