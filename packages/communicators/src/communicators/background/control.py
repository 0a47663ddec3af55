"""Agreement of all ranks on one reason why a collective cannot proceed, by control messages beside the data.

`Control` is pure: messages in, messages out; a world only carries them. Rank 0 is the arbiter, or the lowest rank that
can still be reached: the first reason that reaches it becomes the abort reason that every rank raises.

- A rank that has waited for a while writes `waits` to the peers that it waits for. They compare its facts with what
  they called under the same number; a later call is remembered and compared when they come to it.
- A rank that finds a reason (other facts, a time-out, an exception, a peer that has left) writes it to the arbiter,
  which sends the abort reason to all.
- A rank that gets no answer asks all others, who tell it the abort reason or ask the arbiter in its stead, so that one
  link that is dead does not make two reasons. Still without an answer it takes the next rank for the arbiter.
- A rank that exits writes `leaves` to all.
"""

from __future__ import annotations

import json
import threading
import time
import zlib
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from communicators import errors

if TYPE_CHECKING:
    from communicators.background.call import Call
    from communicators.background.engine import Engine
    from communicators.background.transport import Pending, Transport

REMEMBERED_CALLS = 1024
CONTROL_BYTES = 2048
CHECK_BYTES = 4
ControlMessages = list[tuple[int, bytes]]  # to whom, what


class Control:
    """Abort protocol of one rank.

    abort_reason: reason that all ranks raise, once there is one. told: whether a call of this rank has raised it.
    departed: ranks that have left, and why. ended_calls: how many of the first calls each of those had ended: what it
    sent in them may still be in flight. lost: ranks that cannot be reached any more.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.abort_reason: str | None = None
        self.told = False
        self.departed: dict[int, str] = {}
        self.ended_calls: dict[int, int] = {}
        self.lost: set[int] = set()
        self._reason: str | None = None
        self._asked_by: set[int] = set()
        self._mine: OrderedDict[int, str] = OrderedDict()
        self._theirs: dict[int, tuple[int, str]] = {}

    @property
    def arbiter(self) -> int:
        """Rank that decides on the abort reason, as far as this rank knows."""
        return min(set(range(self.size)) - self.lost)

    def called(self, number: int, facts: str) -> ControlMessages:
        """Records a call of this rank, and compares its facts with those of a peer that waits in it."""
        self._mine[number] = facts
        if len(self._mine) > REMEMBERED_CALLS:
            self._mine.popitem(last=False)
        waiting = self._theirs.pop(number, None)
        return self._compare(number, *waiting) if waiting else []

    def waits(self, number: int, facts: str, peers: list[int]) -> ControlMessages:
        """Tells these peers that this rank has waited long for them."""
        return [(peer, _encoded(kind="waits", rank=self.rank, number=number, facts=facts)) for peer in peers]

    def request_abort(self, reason: str) -> ControlMessages:
        """Requests an abort for a reason that this rank has found; its first reason counts."""
        self._reason = self._reason or reason
        if self.abort_reason is not None:
            return []
        if self.rank == self.arbiter:
            return self._decide(self._reason)
        return [(self.arbiter, _encoded(kind="request", rank=self.rank, reason=self._reason))]

    def ask(self) -> ControlMessages:
        """Asks all ranks, as the arbiter does not answer: it may have told others, or they can still reach it."""
        return self._to_all(_encoded(kind="asks", rank=self.rank, reason=self._reason))

    def lose(self, peer: int) -> ControlMessages:
        """Marks a peer that cannot be reached or does not answer; if it was the arbiter, the next one is asked."""
        before = self.arbiter
        self.lost.add(peer)
        return [] if self._reason is None or self.arbiter == before else self.request_abort(self._reason)

    def departs(self, why: str, calls: int) -> ControlMessages:
        """Tells all ranks that this one exits, and that its first `calls` calls are over."""
        return self._to_all(_encoded(kind="departed", rank=self.rank, why=why, calls=calls))

    def receive(self, message: bytes) -> ControlMessages:
        """Handles a control message that has come."""
        content = _decoded(message)
        if content is None:
            return self.request_abort(f"rank {self.rank} got a corrupted control message: the network changes bits")
        if content["kind"] == "request":  # also where this is not the arbiter: the sender has lost those before it
            sender = content["rank"]
            return self._decide(content["reason"]) or [(sender, _encoded(kind="abort", reason=self.abort_reason))]
        if content["kind"] == "asks" and self.abort_reason is None:
            self._asked_by.add(content["rank"])
            return self.request_abort(content["reason"])
        if content["kind"] == "asks":
            return [(content["rank"], _encoded(kind="abort", reason=self.abort_reason))]
        if content["kind"] == "abort" and self.abort_reason is None:
            self.abort_reason = content["reason"]
            return [(rank, message) for rank in sorted(self._asked_by)]
        if content["kind"] == "departed":
            self.departed[content["rank"]], self.ended_calls[content["rank"]] = content["why"], content["calls"]
        elif content["kind"] == "waits":
            return self._compare(content["number"], content["rank"], content["facts"])
        return []

    def departed_before(self, number: int, peers: list[int]) -> list[int]:
        """Peers that have left and will not take part in this call."""
        return sorted(peer for peer in peers if peer in self.departed and number >= self.ended_calls[peer])

    def _compare(self, number: int, rank: int, facts: str) -> ControlMessages:
        mine = self._mine.get(number)
        if mine is None:
            if not self._mine or number > next(reversed(self._mine)):  # to come; one that is long past is forgotten
                self._theirs[number] = (rank, facts)
            return []
        return [] if mine == facts else self.request_abort(errors.mismatch(number, self.rank, mine, rank, facts))

    def _decide(self, reason: str) -> ControlMessages:
        if self.abort_reason is not None:
            return []
        self.abort_reason = reason
        return self._to_all(_encoded(kind="abort", reason=reason))

    def _to_all(self, message: bytes) -> ControlMessages:
        return [(peer, message) for peer in range(self.size) if peer != self.rank and peer not in self.lost]


def _decoded(message: bytes) -> dict[str, Any] | None:
    """Content of a control message; None where its checksum does not match."""
    check, text = message[:CHECK_BYTES], message[CHECK_BYTES:]
    if zlib.crc32(text).to_bytes(CHECK_BYTES, "big") != check:
        return None
    content: dict[str, Any] = json.loads(text)
    return content


def _encoded(**content: object) -> bytes:
    text = json.dumps(content).encode()
    message = zlib.crc32(text).to_bytes(CHECK_BYTES, "big") + text
    if len(message) <= CONTROL_BYTES:
        return message
    longest = max(content, key=lambda key: len(str(content[key])))
    long = str(content[longest])
    return _encoded(**{**content, longest: long[: len(long) // 2] + "…"})


ABORT_SECONDS = 5.0
"""Wait for an abort reason, after which a rank raises its own.

After half of it all ranks are asked for one, after three quarters the next arbiter.
"""


class CallOwner:
    """Owner of calls over a transport, a communicator or an attempt: how an error of one becomes that of all ranks."""

    def __init__(self, transport: Transport, engine: Engine) -> None:
        self.rank, self.size, self.transport, self.engine = transport.rank, transport.size, transport, engine
        self.control = Control(self.rank, self.size)
        self.released = False  # the transport, which nobody uses from then on
        self.lock = threading.RLock()  # the engine's thread listens while the caller's thread calls

    def count(self, nbytes: int, messages: int) -> None:
        """Counts bytes and messages that this rank has sent."""
        raise NotImplementedError

    def detaches(self, unsent: list[Pending]) -> bool:
        """Whether the last messages of a call are left to the engine, so that the call is over."""
        raise NotImplementedError

    def over(self, call: Call) -> None:
        """Notes that a call has ended, or failed."""

    def request_abort(self, reason: str) -> None:
        """Tells the arbiter why a collective cannot proceed."""
        with self.lock:
            self._write(self.control.request_abort(reason))

    def ask(self) -> None:
        """Asks all ranks why a collective cannot proceed, as the arbiter does not answer."""
        with self.lock:
            self._write(self.control.ask())

    def lose(self, peer: int) -> None:
        """Marks a peer that cannot be reached any more, or does not answer."""
        with self.lock:
            self._write(self.control.lose(peer))

    def report(self, call: Call, peers: list[int]) -> None:
        """Tells the peers what this rank waits for."""
        with self.lock:
            self._write(self.control.waits(call.number, call.facts, peers))

    def _write(self, messages: ControlMessages) -> None:
        for peer, message in () if self.released else messages:
            self.transport.send_control(peer, message)


class RequestedAbort:
    """Abort that this rank has requested.

    reason: this rank's own; the agreed one, `control.abort_reason`, may be another rank's.
    patience: seconds, default ABORT_SECONDS.
    """

    def __init__(self, comm: CallOwner, reason: str, *, patience: float | None = None) -> None:
        self.reason = reason
        self._comm, self._patience = comm, ABORT_SECONDS if patience is None else patience
        self._begin, self._asked, self._asked_next = time.monotonic(), False, False
        comm.request_abort(reason)

    def settled(self) -> bool:
        """Whether there is an abort reason: the arbiter's, the next one's, or at last this rank's own."""
        control, waited = self._comm.control, time.monotonic() - self._begin
        if control.abort_reason is not None:
            return True
        if waited > self._patience / 2 and not self._asked:
            self._asked = True
            self._comm.ask()
        if waited > self._patience * 3 / 4 and not self._asked_next:
            self._asked_next = True
            self._comm.lose(control.arbiter)
        if waited < self._patience:
            return False
        control.abort_reason = self.reason
        return True
