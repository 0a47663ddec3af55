"""Agreement of all ranks on one reason why a collective cannot proceed, by control messages beside the data.

Rank 0 is the arbiter, or the lowest rank that can still be reached: the first reason that reaches it becomes the abort
reason that every rank raises.

- A rank that has waited for a while writes `waits` to the peers that it waits for, and to the arbiter. They compare its
  facts with what they called under the same number; a later call is remembered and compared when they come to it. The
  arbiter adds to the reason of a time-out where all waits lead: the rank that is named there may wait for another.
- A rank that finds a reason (other facts, a time-out, an exception, a peer that has left) writes it to the arbiter,
  which sends the abort reason to all.
- A rank that gets no answer asks all others, who tell it the abort reason or ask the arbiter in its stead, so that one
  link that is dead does not make two reasons. Still without an answer it takes the next rank for the arbiter.
- A rank that exits writes `departed` to all.
- A rank that was itself stopped, or got no time to run, first reads what others have said meanwhile: they may have
  taken the next arbiter. An abort reason among it counts before all else.
"""

import json
import logging
import math
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from communicators import errors
from communicators.background.transport import CONTROL_BYTES, Transport, wrong_return

TIMED_OUT = "timed out"
"""Beginning of the reason of a rank that has waited for too long."""
MOST_NAMED = 16
"""Most ranks that one message or reason names."""
REMEMBERED_CALLS = 1024
CHECK_BYTES = 4
KINDS: dict[str, dict[str, type]] = {
    "waits": {"rank": int, "number": int, "facts": str, "whom": list},
    "request": {"rank": int, "reason": str},
    "asks": {"rank": int, "reason": str},
    "departed": {"rank": int, "why": str, "calls": int},
    "abort": {"reason": str},
}
"""Kinds of control messages, and the types of their fields."""
ABORT_SECONDS = 5.0
"""Wait for an abort reason, after which a rank raises its own.

After half of it all ranks are asked for one, after three quarters the next arbiter: the arbiter may only have had no
time to run, on a busy machine for over a second, and would decide too.
"""
STALL_SECONDS = 0.25
"""Time without reading control messages from which on a rank takes itself to have been stopped."""
HEAR_SECONDS = 0.3
"""Time after a stall in which what was said meanwhile is read, and nothing else is acted upon."""
STALLS_APART_SECONDS = 5.0
"""Least time between two stalls that count: a rank that is always slow goes on."""
SAID_SECONDS = 10.0
"""Wait for others' departure after which it is said, once."""
FAILED_DEPARTURE_SECONDS = 5.0
"""Longest time that the end of a process waits for the peers of a communicator that has failed."""

logger = logging.getLogger(__name__)


class Control:
    """Abort protocol of one rank, over a transport. alone: of an attempt, whose reasons stay on this rank.

    abort_reason: reason that all ranks raise, once there is one. told: whether a call of this rank has raised it.
    departed: ranks that have left, and why. ended_calls: how many of the first calls each of those had ended: what it
    sent in them may still be in flight. lost: ranks that cannot be reached any more. in_flight: numbers of this rank's
    calls that are not over. released: whether the transport is closed. lock: held while any of it changes, because the
    engine's thread listens while the caller's thread calls.
    """

    def __init__(self, transport: Transport, *, alone: bool = False) -> None:
        self.transport, self.rank, self.alone = transport, transport.rank, alone
        self.ranks = {self.rank} if alone else set(range(transport.size))
        self.lock = threading.RLock()
        self.abort_reason: str | None = None
        self.told = self.released = False
        self.departed: dict[int, str] = {}
        self.ended_calls: dict[int, int] = {}
        self.lost: set[int] = set()
        self.in_flight: set[int] = set()
        self._reason: str | None = None
        self._asked_by: set[int] = set()
        self._mine: OrderedDict[int, str] = OrderedDict()
        self._theirs: dict[int, tuple[int, str]] = {}
        self._unread: list[bytes] = []
        self._listened, self._woke = time.monotonic(), -math.inf
        self._waits: dict[int, tuple[int, list[int]]] = {}  # by rank: call and peers of its last long wait

    @property
    def arbiter(self) -> int:
        """Rank that decides on the abort reason, as far as this rank knows."""
        return min(self.ranks - self.lost)

    def called(self, number: int, facts: str) -> None:
        """Records a call of this rank, and compares its facts with those of a peer that waits in it."""
        with self.lock:
            self.in_flight.add(number)
            self._mine[number] = facts
            if len(self._mine) > REMEMBERED_CALLS:
                self._mine.popitem(last=False)
            if waiting := self._theirs.pop(number, None):
                self._compare(number, *waiting)

    def waits(self, number: int, facts: str, peers: Iterable[int]) -> None:
        """Tells these peers, and the arbiter, that this rank has waited long for them."""
        with self.lock:
            whom = list(peers)[:MOST_NAMED]
            self._waits[self.rank] = number, whom
            told = self._others.intersection((*peers, self.arbiter))
            self._write(told, kind="waits", rank=self.rank, number=number, facts=facts, whom=whom)

    def request_abort(self, reason: str) -> None:
        """Requests an abort for a reason that this rank has found; its first reason counts."""
        with self.lock:
            self._reason = self._reason or reason
            if self.abort_reason is not None:
                return
            if self.rank == self.arbiter:
                self._decide(self._reason)
            else:
                self._write([self.arbiter], kind="request", rank=self.rank, reason=self._reason)

    def ask(self) -> None:
        """Asks all ranks, as the arbiter does not answer: it may have told others, or they can still reach it."""
        self._write(self._others, kind="asks", rank=self.rank, reason=self._reason)

    def lose(self, peer: int) -> None:
        """Marks a peer that cannot be reached or does not answer; if it was the arbiter, the next one is asked."""
        with self.lock:
            before = self.arbiter
            self.lost.add(peer)
            if self._reason is not None and self.arbiter != before:
                self.request_abort(self._reason)

    def depart(self, why: str) -> None:
        """Tells all ranks that this one departs, and how many of its first calls are over."""
        with self.lock, self._noted():
            self._write(self._others, kind="departed", rank=self.rank, why=why, calls=self._calls_over())

    def listen(self) -> bool:
        """Reads the control messages that have come, and answers; False where the transport has failed."""
        with self.lock, self._noted():
            if not self.released:
                self._note_stall(time.monotonic())
                came = self.transport.read_control()
                if not isinstance(came, list) or not all(isinstance(message, bytes | bytearray) for message in came):
                    raise wrong_return(self.transport, "read_control", came, "a list of messages as bytes")
                unread = [*self._unread, *came]
                first = [message for message in unread if self._is_news(message)]
                later = [message for message in unread if message not in first]
                self._unread = [] if self.hears() or self.abort_reason is not None else later
                for message in [*first, *([] if self._unread else later)]:
                    self.receive(message)
                for peer in set(self.transport.unreachable()) - self.lost:
                    self.lose(peer)
            return True
        return False

    def hears(self) -> bool:
        """Whether this rank has read its control messages for a while, so that it knows what others have decided."""
        now = time.monotonic()
        return now - self._listened < STALL_SECONDS and now - self._woke >= HEAR_SECONDS

    def must_hear(self) -> bool:
        """Whether others' decisions may lie unread: not in an attempt, nor once nothing is read any more."""
        return not (self.alone or self.released or self.hears())

    def receive(self, message: bytes) -> None:
        """Handles a control message that has come."""
        content = _decoded(message, self.transport.size)
        if content is None:
            self.request_abort(f"rank {self.rank} got a corrupted control message: the network changes bits")
            return
        kind: str = content["kind"]
        rank: Any = content.get("rank")
        reason: Any = content.get("reason")
        if kind == "departed":
            self.departed[rank], self.ended_calls[rank] = content["why"], content["calls"]
        elif kind == "waits":
            self._waits[rank] = content["number"], content["whom"]
            self._compare(content["number"], rank, content["facts"])
        elif kind == "abort" and self.abort_reason is None:
            self.abort_reason = reason
            self._write(self._asked_by, kind="abort", reason=reason)
        elif kind != "abort" and self.abort_reason is not None:
            self._write([rank], kind="abort", reason=self.abort_reason)
        elif kind == "request":  # also where this is not the arbiter: the sender has lost those before it
            self._decide(reason)
        elif kind == "asks":
            self._asked_by.add(rank)
            self.request_abort(reason)

    def departed_before(self, number: int, peers: Iterable[int]) -> list[int]:
        """Peers that have left and will not take part in this call."""
        return sorted(peer for peer in peers if peer in self.departed and number >= self.ended_calls[peer])

    def missing(self) -> list[int]:
        """The peers that have not departed."""
        return sorted(self.ranks - {self.rank, *self.departed})

    def awaited(self) -> list[int]:
        """Peers that may still depart; none where control messages cannot be exchanged any more."""
        return sorted(self._others - self.departed.keys()) if self.transport.closing() else []

    def awaits(self, waited: float, timeout: float | None) -> bool:
        """Whether to wait longer for departures: by default as long as the transport says, less after a failure."""
        if timeout is None:
            usual = self.transport.departure_seconds
            timeout = usual if self.abort_reason is None else min(usual, FAILED_DEPARTURE_SECONDS)
        return waited < timeout and bool(self.awaited())

    def release(self) -> None:
        """Closes the transport, which nobody uses from then on."""
        with self.lock, self._noted():
            self.released = True
            self.transport.close()

    def _is_news(self, message: bytes) -> bool:
        """Whether a message is to be heard at once, also by a rank that was stopped: no answer depends on it."""
        content = _decoded(message, self.transport.size)
        return content is not None and content["kind"] in ("abort", "departed")

    def _note_stall(self, now: float) -> None:
        """Notes that this rank was stopped, unless it was so before: what it has not yet acted on waits once."""
        if now - self._listened > STALL_SECONDS and now - self._woke > STALLS_APART_SECONDS and not self._unread:
            self._woke = now
        self._listened = now

    def _compare(self, number: int, rank: int, facts: str) -> None:
        mine = self._mine.get(number)
        if mine is None:
            if not self._mine or number > next(reversed(self._mine)):  # to come; one that is long past is forgotten
                self._theirs[number] = (rank, facts)
        elif mine != facts:
            self.request_abort(errors.mismatch(number, self.rank, mine, rank, facts))

    def _decide(self, reason: str) -> None:
        """Tells all others, also those that do not answer: one that was only stopped shall not find its own reason."""
        late = self._late() if reason.startswith(TIMED_OUT) else ""
        self.abort_reason = f"{reason}; all waits lead to rank {late}" if late else reason
        self._write(self._others, kind="abort", reason=self.abort_reason)
        for peer in sorted(self.lost - {self.rank}):
            with suppress(Exception):  # it may be out of reach in truth
                self._write([peer], kind="abort", reason=self.abort_reason)

    def _late(self) -> str:
        """Ranks that others wait for in calls that are not over, and that do not wait themselves, as far as known."""
        over = self._calls_over()
        waits = {rank: peers for rank, (number, peers) in self._waits.items() if number >= over}
        late = sorted({peer for peers in waits.values() for peer in peers} - waits.keys())
        return ", ".join(map(str, late[:MOST_NAMED]))

    def _calls_over(self) -> int:
        """Number of the first calls that are over."""
        return min(self.in_flight, default=next(reversed(self._mine), -1) + 1)

    @property
    def _others(self) -> set[int]:
        return self.ranks - self.lost - {self.rank}

    def _write(self, peers: Iterable[int], **content: object) -> None:
        with self.lock:
            for peer in () if self.released else sorted(peers):
                self.transport.send_control(peer, _encoded(**content))

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Fails the communicator by an error of its transport on this rank, which others shall not have to bear."""
        try:
            yield
        except Exception as error:
            failed = f"rank {self.rank}'s transport failed: {errors.describe(error)}"
            self.abort_reason = self.abort_reason or failed


def depart(controls: Sequence[Control], why: str, timeout: float | None = None) -> list[int]:
    """Departs from all peers, then reads control messages until they have departed too: an arbiter may be needed yet.

    Returns the ranks that have not departed after `timeout` seconds, default each control's own limit.
    """
    for control in controls:
        control.depart(why)
    begin, awaited, told = time.monotonic(), list(controls), False
    while awaited:
        waited = time.monotonic() - begin
        awaited = [one for one in awaited if one.listen() and one.awaits(waited, timeout)]
        if awaited and waited > SAID_SECONDS and not told:
            told, ranks = True, sorted({peer for one in awaited for peer in one.awaited()})
            logger.warning(
                "rank %d has departed (%s), and waits for rank %s to", awaited[0].rank, why, str(ranks)[1:-1]
            )
        time.sleep(0.005 if awaited else 0.0)
    for control in controls:
        control.release()
    return sorted({rank for control in controls for rank in control.missing()})


class RequestedAbort:
    """Abort that this rank has requested.

    reason: this rank's own; the agreed one, `control.abort_reason`, may be another rank's.
    patience: seconds.
    """

    def __init__(self, control: Control, reason: str, *, patience: float = ABORT_SECONDS) -> None:
        self.reason, self._control = reason, control
        begin = time.monotonic()
        self._steps = [(begin + patience / 2, control.ask), (begin + patience * 3 / 4, self._take_the_next_arbiter)]
        self._end, self._deaf_since = begin + patience, math.inf
        control.request_abort(reason)

    def settled(self) -> bool:
        """Whether there is an abort reason: the arbiter's, the next one's, or at last this rank's own.

        A rank that was stopped meanwhile hears first what others have decided.
        """
        now, control = time.monotonic(), self._control
        if control.abort_reason is None and control.must_hear():
            self._deaf_since = min(self._deaf_since, now)
            if now - self._deaf_since < HEAR_SECONDS + STALL_SECONDS:
                return False
        while self._control.abort_reason is None and self._steps and now > self._steps[0][0]:
            self._steps.pop(0)[1]()
        if self._control.abort_reason is None and now >= self._end:
            self._control.abort_reason = self.reason
        return self._control.abort_reason is not None

    def _take_the_next_arbiter(self) -> None:
        self._control.lose(self._control.arbiter)


def _decoded(message: bytes, size: int) -> dict[str, Any] | None:
    """Content of a control message among so many ranks; None for bytes that none of them wrote."""
    check, text = message[:CHECK_BYTES], message[CHECK_BYTES:]
    if zlib.crc32(text).to_bytes(CHECK_BYTES, "big") != check:
        return None
    try:
        content: dict[str, Any] = json.loads(text)
        fits = all(type(content[name]) is kind for name, kind in KINDS[content["kind"]].items())
        ranks = [content.get("rank", 0), *content.get("whom", ())]
        fits = fits and all(type(rank) is int and 0 <= rank < size for rank in ranks)
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return content if fits else None


def _encoded(**content: object) -> bytes:
    text = json.dumps(content).encode()
    message = zlib.crc32(text).to_bytes(CHECK_BYTES, "big") + text
    if len(message) <= CONTROL_BYTES:
        return message
    longest = max(content, key=lambda key: len(str(content[key])))
    long = str(content[longest])
    return _encoded(**{**content, longest: long[: len(long) // 2] + "…"})
