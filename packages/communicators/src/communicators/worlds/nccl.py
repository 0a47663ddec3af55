"""NCCL by point-to-point: messages of a GPU that never pass through host memory; opt-in, they have never met a GPU.

They bear neither tags nor lengths, and match in the order of their launch; one that nothing matches is never over. So
that all laws hold, on every rank,

- a call's facts are agreed on by all ranks, over a tagged transport, before its first message;
- calls run first-in first-out: the next one's first round waits until the last one is over;
- a round is one group of sends and receives of exact sizes; rounds of other sizes (`Round.bounded`), calls whose data
  are elsewhere, agreements and control messages go by the tagged transport;
- after each round the host waits until it is over, as in any world, and looks at the clock meanwhile. So nothing that
  a schedule reads back can wait for a peer, and time-outs name the round;
- that a peer is gone shows in the tagged transport's connections, which are watched;
- after a failure the line is aborted, which ends what is still launched.

`UntaggedTransport` is tested over a line that is not NCCL. `NCCL` is reasoned from torch's sources and not yet run: in
particular that `abort` frees a GPU that waits for a message for ever, and what it costs.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from communicators.background.call import Call
from communicators.background.transport import Pending, PendingSum, Transport
from communicators.schedule import Payload, Received, Round
from communicators.worlds.gloo import WAIT

CONNECT_POLL_SECONDS = 1e-3
ABORT_SECONDS = 5.0
"""Longest time that the end of the process waits for a communicator to be aborted."""


class Line(Protocol):
    """Messages without tags or lengths between the ranks of a group, in the order of their launch.

    What was launched is a work of torch.distributed: `is_completed()` says whether it is over, well or not; `wait()`
    then raises what went wrong, and what the current stream does next comes after it.

    device_type: where payloads are. summed: dtypes that it can sum by itself.
    """

    device_type: str
    summed: Collection[torch.dtype]

    def ready(self, device: torch.device) -> bool:
        """Whether it is connected; begins to connect, which all ranks do at the same call. Does not block."""

    def sendrecv(self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor]) -> Any:
        """Launches the messages of one round at once; a receive gets exactly as many bytes as it has room for."""

    def sum(self, tensor: Tensor) -> Any:
        """Launches the sum over all ranks, in place."""

    def duplicate(self) -> Line:
        """Another line between the same ranks."""

    def abort(self) -> None:
        """Ends what is launched, and the line; does not block."""

    def close(self) -> None:
        """Closes the line at exit: nothing of ours is launched any more, or it was aborted."""


class UntaggedTransport(Transport):
    """A line for payloads on its devices, and a tagged transport for everything else."""

    def __init__(self, tagged: Transport, line: Line) -> None:
        self.rank, self.size, self.device, self.threaded = tagged.rank, tagged.size, tagged.device, tagged.threaded
        self.departure_seconds, self.name = tagged.departure_seconds, "nccl"
        self.line, self.untagged = line, line.device_type
        self._tagged = tagged
        self._queue: deque[int] = deque()  # numbers of calls that are not over; the first one has its turn
        self._abandoned: list[object] = []

    def began(self, call: Call) -> None:
        self._queue.append(call.number)

    def ended(self, call: Call) -> None:
        if call.number in self._queue:
            self._queue.remove(call.number)

    def post(self, call: Call, action: Round, device: torch.device) -> Pending:
        """Posts a round; one of the line is launched when its call has its turn."""
        by_line = device.type == self.untagged and call.counted and not action.bounded
        if by_line and (action.sends or action.recvs):
            return _PendingRound(self, call, action, device)
        return self._tagged.post(call, action, device)

    def has_turn(self, call: Call) -> bool:
        """Whether all calls before this one are over."""
        return call.number not in self._queue or self._queue[0] == call.number  # not in it: over itself

    def is_over(self, launched: Any) -> bool:
        """Whether messages were launched and are over. Raises PeerLost where they may never be."""
        if launched is not None and launched.is_completed():
            return True
        if (lost := self._tagged.lost()) is not None:
            raise lost
        return False

    def can_sum(self, tensor: Tensor) -> bool:
        if tensor.device.type == self.untagged:
            return tensor.dtype in self.line.summed
        return self._tagged.can_sum(tensor)

    def post_sum(self, tensor: Tensor) -> Pending:
        """Posts a sum. A round of its call went before, so its call has its turn."""
        if tensor.device.type == self.untagged:
            return _PendingSum(self, self.line.sum(tensor), tensor)
        return self._tagged.post_sum(tensor)

    def duplicate(self, patience: float) -> UntaggedTransport:
        self.duplicates += 1
        return UntaggedTransport(self._tagged.duplicate(patience), self.line.duplicate())

    def duplicate_for_signals(self, patience: float) -> Transport:
        """Duplicate of the tagged transport alone."""
        self.duplicates += 1
        return self._tagged.duplicate_for_signals(patience)

    def abandon(self, *what: object) -> None:
        """Ends the line, and keeps buffers alive that it may still touch."""
        self._abandoned.append(what)
        self.line.abort()

    def nap(self, seconds: float) -> None:
        self._tagged.nap(seconds)

    def send_control(self, peer: int, message: bytes) -> None:
        self._tagged.send_control(peer, message)

    def read_control(self) -> list[bytes]:
        return self._tagged.read_control()

    def unreachable(self) -> list[int]:
        return self._tagged.unreachable()

    def closing(self) -> bool:
        return self._tagged.closing()

    def close(self) -> None:
        self.line.close()
        self._tagged.close()


class _PendingRound(Pending):
    """A round that is launched when its call's turn has come."""

    def __init__(self, transport: UntaggedTransport, call: Call, action: Round, device: torch.device) -> None:
        self._transport, self._call, self._action, self._device = transport, call, action, device
        self._launched: Any = None
        self._payloads: Received = {}
        self._buffers: Received = {}

    def done(self) -> bool:
        if self._launched is None and not self.waits_its_turn and self._transport.line.ready(self._device):
            self._launched = self._launch()
        return self._transport.is_over(self._launched)

    def received(self) -> Received:
        assert self._launched is not None
        self._launched.wait()
        for peer, buffer in self._buffers.items():
            self._call.accept_unread(peer, buffer)
        return self._buffers

    def missing(self) -> list[int]:
        return sorted({*self._action.sends, *self._action.recvs})

    @property
    def waits_its_turn(self) -> bool:  # type: ignore[override]
        return not self._transport.has_turn(self._call)

    def cancel(self) -> None:
        if self._launched is not None:
            self._transport.abandon(self._launched, self._payloads, self._buffers)

    def _launch(self) -> Any:
        for peer, payload in self._action.sends.items():
            self._payloads[peer] = Payload(payload.memory.to(self._device))
            self._call.stamp(self._payloads[peer])
        for peer, nbytes in self._action.recvs.items():
            self._buffers[peer] = Payload.allocate(nbytes, self._device)
        try:
            return self._transport.line.sendrecv(_memories(self._payloads), _memories(self._buffers))
        except Exception:  # some of it may be in flight
            self._transport.abandon(self._payloads, self._buffers)
            raise


def _memories(payloads: Received) -> dict[int, Tensor]:
    return {peer: payload.memory for peer, payload in payloads.items()}


class _PendingSum(PendingSum):
    def __init__(self, transport: UntaggedTransport, launched: Any, tensor: Tensor) -> None:
        super().__init__(transport)
        self._untagged, self._launched, self._tensor = transport, launched, tensor

    def done(self) -> bool:
        return self._untagged.is_over(self._launched)

    def received(self) -> Received:
        self._launched.wait()
        return {}

    def cancel(self) -> None:
        self._untagged.abandon(self._launched, self._tensor)


class NCCL:
    """A communicator of our own with a group's ranks, made when the first call has its turn; one GPU a rank."""

    device_type = "cuda"
    summed: Collection[torch.dtype] = (
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.int8, torch.uint8, torch.int32, torch.int64),
    )

    def __init__(self, store: Store, rank: int, size: int) -> None:
        from torch._C._distributed_c10d import ProcessGroupNCCL  # not in every build of torch

        self._store, self._duplicates = store, 0
        options = ProcessGroupNCCL.Options()
        options._timeout = WAIT  # the engine watches the clock; NCCL's own watchdog ends the process
        self._group: Any = ProcessGroupNCCL(store, rank, size, options)
        self._device: torch.device | None = None
        self._connected: Future[None] = Future()
        self._aborting: threading.Thread | None = None

    def ready(self, device: torch.device) -> bool:
        """Whether NCCL is connected; ValueError for a second device."""
        if self._device is None:
            self._device = device
            threading.Thread(target=self._connect, name="communicators-nccl", daemon=True).start()
        if device != self._device:
            raise ValueError(f"data are on {device}, but were on {self._device} before: use one GPU a rank and group")
        return self._connected.done() and self._connected.result() is None

    def sendrecv(self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor]) -> Any:
        """Launches a round as one coalesced group."""
        self._group._start_coalescing()
        try:
            for peer, buffer in recvs.items():
                self._group.recv([buffer], peer, 0)
            for peer, payload in sends.items():
                self._group.send([payload], peer, 0)
        finally:  # NCCL counts open groups by thread: the user's own calls would be caught in it
            launched: Any = self._group._end_coalescing()
        return launched

    def sum(self, tensor: Tensor) -> Any:
        """Launches NCCL's own allreduce, in place."""
        launched: Any = self._group.allreduce([tensor])
        return launched

    def duplicate(self) -> NCCL:
        """Another NCCL communicator of the same ranks."""
        self._duplicates += 1
        store = PrefixStore(f"duplicate/{self._duplicates}", self._store)
        return NCCL(store, self._group.rank(), self._group.size())

    def abort(self) -> None:
        """Aborts in a thread of its own, which waits for NCCL's."""
        if self._aborting is None:
            self._aborting = threading.Thread(target=self._group.abort, name="communicators-abort", daemon=True)
            self._aborting.start()

    def close(self) -> None:
        """Aborts: an orderly end would wait for all ranks, but they have departed, or are lost."""
        self.abort()
        if self._aborting is not None:
            self._aborting.join(ABORT_SECONDS)

    def _connect(self) -> None:
        """Connects by a first sum: groups of messages go by the communicator of all ranks, which they do not make."""
        try:
            launched = self.sum(torch.zeros(1, device=self._device))
            while not launched.is_completed():
                time.sleep(CONNECT_POLL_SECONDS)
            launched.wait()
            self._connected.set_result(None)
        except Exception as error:
            self._connected.set_exception(error)


def uses_nccl(group: dist.ProcessGroup) -> bool:
    """Whether a group's backend for CUDA tensors is NCCL."""
    try:
        return bool(group._get_backend(torch.device("cuda")).name() == "nccl")
    except RuntimeError:  # none for CUDA tensors
        return False
