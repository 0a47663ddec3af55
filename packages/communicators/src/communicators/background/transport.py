"""Interface of a new world: a transport, for the messages of a round and for control messages beside them."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from communicators.background.call import Call
from communicators.schedule import Received, Round

LONGEST_NAP_SECONDS = 200e-6
"""Where nothing ends a nap when a message comes."""


class PeerLost(Exception):  # noqa: N818 - news, not yet an error: a control message may say why it left
    """Lost connection to a peer. died: a peer that leaves by itself would not lose it, so no message comes."""

    def __init__(self, peer: int, error: BaseException, *, died: bool = False) -> None:
        self.peer, self.error, self.died = peer, error, died


class Pending(ABC):
    """Messages in flight.

    waits_its_turn: whether nothing is in flight yet because an earlier call is, whose clock counts.
    """

    waits_its_turn: bool = False

    @abstractmethod
    def done(self) -> bool:
        """Whether all are sent and received; does not block. Raises PeerLost."""

    def come(self) -> list[int]:
        """Peers whose message has come, as far as it is known before all has `arrived`; for traces."""
        return []

    def arrived(self) -> bool:
        """Whether all that this rank receives has come. Does not block. Raises PeerLost.

        The last of its own messages may be known to have come much later: a transport that waits for receipts needs
        another α for that.
        """
        return self.done()

    @abstractmethod
    def received(self) -> Received:
        """Payloads by peer, once they have `arrived`; each checked by `call.accept(peer, payload, recvs[peer])`."""

    @abstractmethod
    def missing(self) -> list[int]:
        """The peers that this rank still waits for."""

    @abstractmethod
    def cancel(self) -> None:
        """Gives up; buffers that are still in use stay alive."""


class PendingSum(Pending):
    """A transport's own sum in flight, which waits for all ranks.

    done: whether it is over. cancel: gives it up. receive: puts its result in place.
    """

    def __init__(
        self,
        transport: Transport,
        done: Callable[[], bool],
        cancel: Callable[[], None],
        receive: Callable[[], object] = lambda: None,
    ) -> None:
        self._transport, self._done, self._cancel, self._receive = transport, done, cancel, receive

    def done(self) -> bool:
        return self._done()

    def received(self) -> Received:
        self._receive()
        return {}

    def missing(self) -> list[int]:
        return [peer for peer in range(self._transport.size) if peer != self._transport.rank]

    def cancel(self) -> None:
        self._cancel()


CONTROL_BYTES = 2048
"""Most bytes of a control message."""
SIGNAL_BYTES = 520
"""Most bytes that one message of a `SignalLine` holds."""


class SignalLine(ABC):
    """Short messages between any two ranks at any time; from one peer they come in order, one after the other."""

    @abstractmethod
    def send(self, peer: int, message: bytes) -> None:
        """Sends at most SIGNAL_BYTES to a peer to which nothing is in flight; does not block."""

    @abstractmethod
    def sent(self, peer: int) -> bool:
        """Whether nothing is in flight to this peer any more: it has taken it. Does not block. Raises PeerLost."""

    @abstractmethod
    def received(self) -> list[tuple[int, bytes]]:
        """Messages that have come, by source; a message may be followed by other bytes. Does not block."""

    @abstractmethod
    def close(self) -> None:
        """Ends sending and receiving; does not block."""


class Transport(ABC):
    """Carries rounds and control messages between ranks. `rank`, `size`, `device`, `threaded` have no defaults.

    device: of payloads, unless a call names another one.
    threaded: whether another thread may drive it while the caller computes.
    name: how data on a GPU travel, "host" or "nccl".
    outlives_ranks: whether messages between the others go on where a rank has died.
    departure_seconds: how long the end of the process waits for other ranks' departure.
    connections: by TCP, to each peer.
    duplicates: how many were made of it.
    untagged: type of the devices whose calls' messages bear no tags. Such a call is agreed on by all ranks before its
        first message, and has the device in its facts: a rank whose data lie elsewhere would send another way.
    summed: dtypes of which it has a sum of its own, on the CPU.
    group: text that tells its group of ranks from others, the same on all of them; for traces.
    notices: whether it calls the engine's `notice` whenever a message on the CPU has come, was taken or is lost.
    """

    rank: int
    size: int
    device: torch.device
    threaded: bool
    departure_seconds: float = math.inf
    connections: int = 1
    duplicates: int = 0
    name: str = "host"
    outlives_ranks: bool = False
    untagged: str | None = None
    summed: Collection[torch.dtype] = ()
    group: str = ""
    notices: bool = False

    @abstractmethod
    def post(self, call: Call, action: Round, device: torch.device) -> Pending:
        """Posts all sends and receives of a round; received payloads are put on `device`.

        Each payload that goes is first stamped, `call.stamp(payload)`, and travels whole (`payload.memory`). Tags are
        `call.tag(peer, call.sent)` of what goes and `call.tag(peer, call.heard)` of what comes, once a message.
        """

    def began(self, call: Call) -> None:  # noqa: B027 - only who has no tags needs it
        """Notes an untagged call; called in the order of the calls' numbers."""

    def ended(self, call: Call) -> None:  # noqa: B027
        """Notes that a call is over, or has failed."""

    @abstractmethod
    def send_control(self, peer: int, message: bytes) -> None:
        """Sends a control message (at most CONTROL_BYTES); does not block."""

    @abstractmethod
    def read_control(self) -> list[bytes]:
        """The control messages that have come; does not block."""

    def nap(self, seconds: float) -> None:
        """Waits at most `seconds` for messages to come, less where their coming would not end it."""
        time.sleep(min(seconds, LONGEST_NAP_SECONDS))

    def can_sum(self, tensor: Tensor) -> bool:
        """Whether the transport has an allreduce of its own for this dtype and device."""
        return tensor.device.type == "cpu" and tensor.dtype in self.summed

    def post_sum(self, tensor: Tensor) -> Pending:
        """The transport's own allreduce, in place on a contiguous tensor."""
        raise NotImplementedError(f"{type(self).__name__} has no allreduce of its own")

    def unreachable(self) -> list[int]:
        """Peers whose connection is known to be gone; the end of the process waits for the departure of all others."""
        return []

    def closing(self) -> bool:
        """Whether control messages can still be exchanged."""
        return True

    def duplicate(self, patience: float) -> Transport:
        """Another transport of the same ranks, which all make it now; waits at most `patience` seconds for them."""
        raise NotImplementedError(f"{type(self).__name__} cannot be duplicated: it lacks duplicate(patience)")

    def duplicate_for_signals(self, patience: float) -> Transport:
        """Duplicate for a transport that carries nothing but `signal_line()`."""
        return self.duplicate(patience)

    def signal_line(self) -> SignalLine:
        """The line for signals, of which a transport has one."""
        raise NotImplementedError(f"{type(self).__name__} carries no signals: it lacks signal_line()")

    def close(self) -> None:  # noqa: B027 - most have nothing to do
        """Releases what would keep the process from ending."""


def check_transport(transport: Any) -> Transport:
    """The transport; TypeError or ValueError for what is none, or lacks what has no default."""
    kind = type(transport).__name__
    if not isinstance(transport, Transport):
        raise TypeError(f"transport is {transport!r}, expected a Transport")
    for name, expected in {"rank": int, "size": int, "device": torch.device, "threaded": bool}.items():
        given = getattr(transport, name, None)
        if not isinstance(given, expected) or (expected is int and isinstance(given, bool)):
            what = f"{expected.__module__}.{expected.__name__}".removeprefix("builtins.")
            raise TypeError(f"{kind}.{name} is {given!r}, expected {what}: set it before a communicator is made of it")
    if not 0 <= transport.rank < transport.size:
        raise ValueError(f"{kind} has rank {transport.rank} of size {transport.size}, expected 0 ≤ rank < size")
    return transport


def wrong_return(whose: object, method: str, given: object, expected: str) -> TypeError:
    """Error of an author's method that returned something else."""
    return TypeError(f"{type(whose).__name__}.{method}() returned {given!r}, expected {expected}")
