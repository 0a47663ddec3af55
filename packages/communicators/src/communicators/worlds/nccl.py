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
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from communicators.background.call import Call
from communicators.background.transport import Pending, PendingSum, Transport
from communicators.communicator import TIMEOUT_SECONDS
from communicators.schedule import Payload, Received, Round
from communicators.worlds.gloo import GlooTransport
from communicators.worlds.gloo_group import WAIT
from communicators.worlds.meeting import Rendezvous, reconnected

CONNECT_POLL_SECONDS = 1e-3
ABORT_SECONDS = 5.0
"""Longest time that the end of the process waits for a communicator to be aborted."""


class UntaggedTransport(GlooTransport):
    """A line for payloads on its devices; gloo, which has tags, for everything else.

    line: makes messages without tags or lengths between the ranks that have met, in the order of their launch: `NCCL`,
    or what has the same methods. What it launches is a work of torch.distributed: `is_completed()` says whether it is
    over, well or not; `wait()` then raises what went wrong, and what the current stream does next comes after it.
    """

    name = "nccl"
    notices = False  # of what the line has done, nobody is told
    nap = Transport.nap

    def __init__(
        self, rendezvous: Rendezvous, line: Callable[[Rendezvous], NCCL], patience: float = TIMEOUT_SECONDS
    ) -> None:
        super().__init__(rendezvous, patience)
        self._make_line, self.line = line, line(self.rendezvous)
        self.untagged = self.line.device_type
        self._queue: deque[int] = deque()  # numbers of calls that are not over; the first one has its turn
        self._launched: list[object] = []  # that the line may still touch

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
        return super().post(call, action, device)

    def has_turn(self, call: Call) -> bool:
        """Whether all calls before this one are over."""
        return call.number not in self._queue or self._queue[0] == call.number  # not in it: over itself

    def is_over(self, launched: Any) -> bool:
        """Whether messages were launched and are over. Raises PeerLost where they may never be."""
        if launched is not None and launched.is_completed():
            return True
        if (lost := self.lost()) is not None:
            raise lost
        return False

    def can_sum(self, tensor: Tensor) -> bool:
        return tensor.dtype in self.line.summed if tensor.device.type == self.untagged else super().can_sum(tensor)

    def post_sum(self, tensor: Tensor) -> Pending:
        """Posts a sum. A round of its call went before, so its call has its turn."""
        if tensor.device.type != self.untagged:
            return super().post_sum(tensor)
        launched = self.line.sum(tensor)
        done, cancel = (lambda: self.is_over(launched)), (lambda: self.abort(launched, tensor))
        return PendingSum(self, done, cancel, launched.wait)

    def duplicate(self, patience: float) -> Transport:
        return self._another(lambda there, patience: UntaggedTransport(there, self._make_line, patience), patience)

    def duplicate_for_signals(self, patience: float) -> Transport:
        """Duplicate without a line."""
        return super().duplicate(patience)

    def abort(self, *launched: object) -> None:
        """Ends the line, and keeps buffers alive that it may still touch."""
        self._launched.append(launched)
        self.line.abort()

    def close(self) -> None:
        self.line.close()
        super().close()


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
            self._transport.abort(self._launched, self._payloads, self._buffers)

    def _launch(self) -> Any:
        for peer, payload in self._action.sends.items():
            self._payloads[peer] = Payload(payload.memory.to(self._device))
            self._call.stamp(self._payloads[peer])
        for peer, nbytes in self._action.recvs.items():
            self._buffers[peer] = Payload.allocate(nbytes, self._device)
        try:
            return self._transport.line.sendrecv(_memories(self._payloads), _memories(self._buffers))
        except Exception:  # some of it may be in flight
            self._transport.abort(self._payloads, self._buffers)
            raise


def _memories(payloads: Received) -> dict[int, Tensor]:
    return {peer: payload.memory for peer, payload in payloads.items()}


class NCCL:
    """A communicator of our own with a group's ranks, made when the first call has its turn; one GPU a rank."""

    device_type = "cuda"
    summed: Collection[torch.dtype] = (
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.int8, torch.uint8, torch.int32, torch.int64),
    )

    def __init__(self, store: Store, rank: int, size: int) -> None:
        from torch._C._distributed_c10d import ProcessGroupNCCL  # not in every build of torch

        options = ProcessGroupNCCL.Options()
        options._timeout = WAIT  # the engine watches the clock; NCCL's own watchdog ends the process
        self._group: Any = ProcessGroupNCCL(store, rank, size, options)
        self._device: torch.device | None = None
        self._connected: Future[None] = Future()
        self._aborting: threading.Thread | None = None

    @classmethod
    def of(cls, met: Rendezvous) -> NCCL:
        """NCCL between ranks that have met, by a client of the Store of our own."""
        return cls(reconnected(met.elsewhere("nccl").shared), met.rank, met.size)

    def ready(self, device: torch.device) -> bool:
        """Whether NCCL is connected; begins to, which all ranks do at the same call. ValueError for a second device."""
        if self._device is None:
            self._device = device
            threading.Thread(target=self._connect, name="communicators-nccl", daemon=True).start()
        if device != self._device:
            raise ValueError(f"data are on {device}, but were on {self._device} before: use one GPU a rank and group")
        return self._connected.done() and self._connected.result() is None

    def sendrecv(self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor]) -> Any:
        """Launches a round as one coalesced group; a receive gets exactly as many bytes as it has room for."""
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
