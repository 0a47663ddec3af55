"""Messages that bear neither tags nor lengths, as NCCL's, under the same laws as any others.

Such messages match in the order of their launch, and one that nothing matches is never over. So, on every rank,

- a call's facts are agreed on by all ranks, over a tagged transport, before its first message;
- calls run first-in first-out: the next one's first round waits until the last one is over;
- a round is one group of sends and receives of exact sizes; rounds of other sizes (`Round.bounded`), calls whose data
  are elsewhere, agreements and control messages go by the tagged transport;
- after each round the host waits until it is over, as in any world, and looks at the clock meanwhile. So nothing that
  a schedule reads back can wait for a peer, and time-outs name the round;
- that a peer is gone shows in the tagged transport's connections, which are watched;
- after a failure the line is aborted, which ends what is still launched.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from communicators.background.call import Call
from communicators.background.transport import Pending, Transport
from communicators.schedule import Payload, Received, Round


class Launched(Protocol):
    """Messages in flight: a work of torch.distributed."""

    def is_completed(self) -> bool:
        """Whether they are over, well or not; does not block."""

    def wait(self) -> Any:
        """Raises what went wrong, once they are over; what the current stream does next comes after them."""


class Line(Protocol):
    """Messages without tags or lengths between the ranks of a group, in the order of their launch.

    device_type: where payloads are. summed: dtypes that it can sum by itself.
    """

    device_type: str
    summed: Collection[torch.dtype]

    def ready(self, device: torch.device) -> bool:
        """Whether it is connected; begins to connect, which all ranks do at the same call. Does not block."""

    def sendrecv(self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor]) -> Launched:
        """Launches the messages of one round at once; a receive gets exactly as many bytes as it has room for."""

    def sum(self, tensor: Tensor) -> Launched:
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
        self.line = line
        self._tagged = tagged
        self._queue: deque[int] = deque()  # numbers of calls that are not over; the first one has its turn
        self._abandoned: list[object] = []

    def untagged(self, device: torch.device) -> bool:
        return device.type == self.line.device_type

    def began(self, call: Call) -> None:
        self._queue.append(call.number)

    def ended(self, call: Call) -> None:
        if call.number in self._queue:
            self._queue.remove(call.number)

    def post(self, call: Call, action: Round, device: torch.device) -> Pending:
        """Posts a round; one of the line is launched when its call has its turn."""
        by_line = self.untagged(device) and call.counted and not action.bounded
        if by_line and (action.sends or action.recvs):
            return _PendingRound(self, call, action, device)
        return self._tagged.post(call, action, device)

    def has_turn(self, call: Call) -> bool:
        """Whether all calls before this one are over."""
        return call.number not in self._queue or self._queue[0] == call.number  # not in it: over itself

    def is_over(self, launched: Launched | None) -> bool:
        """Whether messages were launched and are over. Raises PeerLost where they may never be."""
        if launched is not None and launched.is_completed():
            return True
        if (lost := self._tagged.lost()) is not None:
            raise lost
        return False

    def can_sum(self, tensor: Tensor) -> bool:
        if self.untagged(tensor.device):
            return tensor.dtype in self.line.summed
        return self._tagged.can_sum(tensor)

    def post_sum(self, tensor: Tensor) -> Pending:
        """Posts a sum. A round of its call went before, so its call has its turn."""
        if self.untagged(tensor.device):
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
        self._launched: Launched | None = None
        self._payloads: Received = {}
        self._buffers: Received = {}

    def done(self) -> bool:
        if self._launched is None and not self.waits_its_turn() and self._transport.line.ready(self._device):
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

    def waits_its_turn(self) -> bool:
        return not self._transport.has_turn(self._call)

    def cancel(self) -> None:
        if self._launched is not None:
            self._transport.abandon(self._launched, self._payloads, self._buffers)

    def _launch(self) -> Launched:
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


class _PendingSum(Pending):
    def __init__(self, transport: UntaggedTransport, launched: Launched, tensor: Tensor) -> None:
        self._transport, self._launched, self._tensor = transport, launched, tensor

    def done(self) -> bool:
        return self._transport.is_over(self._launched)

    def received(self) -> Received:
        self._launched.wait()
        return {}

    def missing(self) -> list[int]:
        return [peer for peer in range(self._transport.size) if peer != self._transport.rank]

    def cancel(self) -> None:
        self._transport.abandon(self._launched, self._tensor)
