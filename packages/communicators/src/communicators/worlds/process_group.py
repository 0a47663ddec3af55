"""torch.distributed by point-to-point, on a gloo group of our own with the user's ranks.

Control messages travel there too, so that the Store, which one rank holds and which may not answer, is only needed to
meet. CUDA payloads are staged through pinned host memory, unless NCCL is asked for (see `nccl`).
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.constants import default_pg_nccl_timeout, default_pg_timeout

from communicators.background.abort import CONTROL_BYTES
from communicators.background.call import TAG_BITS, Call
from communicators.background.transport import SIGNAL_BYTES, PeerLost, Pending, Transport
from communicators.background.transport_communicator import TransportCommunicator
from communicators.communicator import TIMEOUT_SECONDS
from communicators.errors import CollectiveError
from communicators.schedule import Payload, Received, Round
from communicators.worlds.gloo_group import GlooGroup
from communicators.worlds.mailbox import GlooSignalLine, Mailbox
from communicators.worlds.nccl.point_to_point import NCCL, uses_nccl
from communicators.worlds.nccl.untagged import UntaggedTransport
from communicators.worlds.staging import host_payload, to_device, to_host
from communicators.worlds.stores import REMEDY, meet, reconnected, store_of
from communicators.worlds.waiters import Wait, Waiters

T = TypeVar("T")

STORE_SECONDS = 0.5
"""Wait beyond its time-out of a first call whose Store does not answer at all."""
CLOSE_SECONDS = 1.0
"""Longest time that the control messages of a closed communicator may take to be sent."""
LOST_SECONDS = 1.0
"""Longest time after a failure of gloo's own sum to find out whose connection was lost."""
CONTROL_TAG = 1 << TAG_BITS
SIGNAL_TAG = CONTROL_TAG + 1
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
) -> TransportCommunicator:
    """Our communicator for a process group; made once for each. Collective over its ranks at the first use.

    store: where its ranks meet, default the group's own. Another store than before, a group that was set up anew, as
    after a rank was lost, and a communicator whose failure this rank has raised make a new communicator.

    Its `timeout` is what the group was made with, TIMEOUT_SECONDS where that is torch's default.
    patience: seconds that the first use waits for the other ranks, default that `timeout`. transport: "nccl" for data
    on a GPU by NCCL; ValueError where the group does not use it, or is in use with another one already. CollectiveError
    where ranks of a failed communicator are gone, and the group is the same.
    """
    generation = _generation(group)
    made, met_by, met_as = _made.get(group, (None, None, None))
    if made is not None and (met_as != generation or made.closed or (store is not None and store is not met_by)):
        made = None
    if made is not None and (reason := made.control.abort_reason) is not None:
        if made.gone and store is None:
            raise CollectiveError(f"{reason}; {REMEDY}")
        if made.control.told:  # a rank between calls would meet others in another call than theirs
            made = None
    if made is not None and transport not in (None, made.transport.name):
        raise ValueError(f"transport={transport!r}, but this process group is in use with {made.transport.name!r}")
    if made is None:
        timeout = timeout_of(group)
        waits = timeout if patience is None else patience
        made = TransportCommunicator(_in_time(lambda: _connected(group, waits, transport, store), group.rank(), waits))
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


def _connected(group: dist.ProcessGroup, patience: float, transport: str | None, store: Store | None) -> Transport:
    if transport == "nccl" and not uses_nccl(group):
        raise ValueError('transport="nccl", but the process group does not use NCCL for CUDA tensors: leave it out')
    tagged = ProcessGroupTransport(Rendezvous.of(group, store_of(group) if store is None else store), patience)
    if transport != "nccl":
        return tagged
    there = reconnected(tagged.rendezvous.elsewhere("nccl").shared)
    return UntaggedTransport(tagged, NCCL(there, tagged.rank, tagged.size))


def _in_time(make: Callable[[], T], rank: int, seconds: float) -> T:
    """Calls `make` in a thread that is left behind where a Store blocks it: the kernel waits for many minutes."""
    made: Future[T] = Future()

    def work() -> None:
        try:
            made.set_result(make())
        except BaseException as error:
            made.set_exception(error)

    threading.Thread(target=work, name="communicators-first-call", daemon=True).start()
    try:
        return made.result(seconds + STORE_SECONDS)
    except TimeoutError:
        raise CollectiveError(
            f"timed out after {seconds:g} s: rank {rank} made its first call with this process group, but the group's "
            f"Store, by which its ranks meet, does not answer; {REMEDY}"
        ) from None


def timeout_of(group: dist.ProcessGroup) -> float:
    """Seconds that the group was given; TIMEOUT_SECONDS where nobody gave it any."""
    for kind in ("cpu", "cuda"):
        try:
            given: timedelta = group._get_backend(torch.device(kind)).options._timeout
        except (AttributeError, RuntimeError):  # no backend for this kind, or one without settings
            continue
        return TIMEOUT_SECONDS if given in TORCH_TIMEOUTS else given.total_seconds()
    return TIMEOUT_SECONDS


class Rendezvous(NamedTuple):
    """Meeting place of ranks: keys of one Store, by a client of our own and by the group's."""

    rank: int
    size: int
    own: Store
    shared: Store

    @classmethod
    def of(cls, group: dist.ProcessGroup, keys: Store) -> Rendezvous:
        """Rendezvous of a group's ranks, among these keys."""
        own, shared = PrefixStore("communicators", reconnected(keys)), PrefixStore("communicators", keys)
        return cls(group.rank(), group.size(), own, shared)

    def met(self, patience: float) -> Rendezvous:
        """Rendezvous of the same ranks, once all of them are here, under a prefix that is new."""
        return self.elsewhere(meet(self.own, self.rank, self.size, patience))

    def elsewhere(self, prefix: str) -> Rendezvous:
        """Rendezvous of the same ranks, under a further prefix."""
        return self._replace(own=PrefixStore(prefix, self.own), shared=PrefixStore(prefix, self.shared))


class ProcessGroupTransport(Transport):
    """A gloo group, for payloads and for control messages."""

    threaded = outlives_ranks = True
    departure_seconds = 2.0  # nothing of gloo waits for anybody at the end

    def __init__(self, rendezvous: Rendezvous, patience: float = TIMEOUT_SECONDS) -> None:
        self.rank, self.size = rendezvous.rank, rendezvous.size
        self.device = torch.device("cpu")
        self.rendezvous = rendezvous.met(patience)
        self._data = GlooGroup(self.rendezvous.shared, self.rank, self.size)
        self.rendezvous.met(patience)  # to a rank that closes at once, others could be connecting yet
        self._waiters = Waiters()
        self._control = self._mailbox(CONTROL_TAG, CONTROL_BYTES)
        self._abandoned: list[Wait] = []
        ending = (self._data, self._waiters, self._control, self._abandoned)
        self._end = weakref.finalize(self, _end, *ending, timeout=1.0)  # without close(): of a destroyed group
        self._end.atexit = False

    def post(self, call: Call, action: Round, device: torch.device) -> Pending:
        buffers = {peer: host_payload(nbytes, device) for peer, nbytes in action.recvs.items()}
        receives = {peer: self._receive(buffer, peer, call.incoming_tag(peer)) for peer, buffer in buffers.items()}
        sends = {peer: self._send(call, to_host(payload), peer) for peer, payload in action.sends.items()}
        return _PendingRound(self, call, receives, sends, buffers, device)

    def duplicate(self, patience: float) -> ProcessGroupTransport:
        self.duplicates += 1
        there = self.rendezvous.elsewhere(f"duplicate/{self.duplicates}")
        return _in_time(lambda: ProcessGroupTransport(there, patience), self.rank, patience)

    def can_sum(self, tensor: Tensor) -> bool:
        """Whether gloo can sum this tensor: on the CPU, of a dtype that it knows."""
        return tensor.device.type == "cpu" and tensor.dtype in _SUMMED

    def post_sum(self, tensor: Tensor) -> Pending:
        """Posts gloo's own sum, which aborts the process if ranks' sizes differ: they have agreed on them here."""
        return _PendingSum(self._waiters.wait_for(self._data.allreduce([tensor])), self)

    def nap(self, seconds: float) -> None:
        """Waits at most `seconds` for a waiter to have news."""
        self._waiters.news.wait(seconds)
        self._waiters.news.clear()

    def send_control(self, peer: int, message: bytes) -> None:
        self._control.write(peer, message)

    def read_control(self) -> list[bytes]:
        return [message for _, message in self._control.read()]

    def unreachable(self) -> list[int]:
        return self._control.unreachable()

    def lost(self) -> PeerLost | None:
        return self._control.lost()

    def close(self) -> None:
        self._control.flush(CLOSE_SECONDS)
        self._end()

    def abandon(self, waits: list[Wait]) -> None:
        """Keeps waits that nobody asks for any more. Giving them up would end connections of control messages."""
        self._abandoned += [wait for wait in waits if not wait.done]

    def signal_line(self) -> GlooSignalLine:
        return GlooSignalLine(self._mailbox(SIGNAL_TAG, SIGNAL_BYTES), self.abandon)

    def _mailbox(self, tag: int, nbytes: int) -> Mailbox:
        return Mailbox(self._data, self.rank, self.size, self._waiters, tag=tag, nbytes=nbytes)

    def _send(self, call: Call, payload: Payload, peer: int) -> Wait:
        call.stamp(payload)
        tag = call.outgoing_tag(peer)
        return self._waiters.posted(lambda: self._data.send([payload.memory], peer, tag))

    def _receive(self, buffer: Payload, peer: int, tag: int) -> Wait:
        return self._waiters.posted(lambda: self._data.recv([buffer.memory], peer, tag))


class _PendingRound(Pending):
    def __init__(
        self,
        transport: ProcessGroupTransport,
        call: Call,
        receives: dict[int, Wait],
        sends: dict[int, Wait],
        buffers: dict[int, Payload],
        device: torch.device,
    ) -> None:
        self._transport, self._call, self._buffers, self._device = transport, call, buffers, device
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
            payload = self._call.cut(buffer)  # gloo does not say how much has come
            self._call.accept(peer, payload, buffer.nbytes)
            received[peer] = to_device(payload, self._device)
        return received

    def missing(self) -> list[int]:
        return sorted({peer for peer, wait in self._waits if not wait.done or wait.error is not None})

    def cancel(self) -> None:
        self._transport.abandon([wait for _, wait in self._waits])


class _PendingSum(Pending):
    def __init__(self, wait: Wait, transport: ProcessGroupTransport) -> None:
        self._wait, self._transport, self._failed = wait, transport, 0.0

    def done(self) -> bool:
        if self._wait.error is None:
            return self._wait.done
        if (lost := self._transport.lost()) is not None:  # gloo does not say which rank it was
            raise lost
        self._failed = self._failed or time.monotonic()
        if time.monotonic() - self._failed > LOST_SECONDS:
            raise self._wait.error
        return False

    def received(self) -> Received:
        return {}

    def missing(self) -> list[int]:
        return [peer for peer in range(self._transport.size) if peer != self._transport.rank]

    def cancel(self) -> None:
        self._transport.abandon([self._wait])


def _end(data: GlooGroup, waiters: Waiters, control: Mailbox, abandoned: list[Wait], timeout: float) -> None:
    """Lets the threads go, then the group: a thread that still waits when the interpreter ends would abort it."""
    control.close()
    for wait in abandoned:
        wait.give_up()
    waiters.close(timeout)
    data.close()


_SUMMED = {torch.float32, torch.float64, torch.int8, torch.int32, torch.int64, torch.uint8}
