"""How ranks come to the same reason when a collective cannot proceed: letters on a channel beside the data.

Pure: letters in, letters out; a world only carries them. Rank 0 is the arbiter, or the lowest rank that can still be
reached: the first reason that reaches it becomes the verdict that every rank raises.

- A rank that has waited for a while writes `waits` to the peers that it waits for. They compare its facts with what
  they called under the same number; a later call is remembered and compared when they come to it.
- A rank that finds a reason (other facts, a time-out, an exception, a peer that has left) writes it to the arbiter,
  which writes the verdict to all.
- A rank that exits writes `leaves` to all.
"""

from __future__ import annotations

import json
import zlib
from collections import OrderedDict
from typing import Any

from communicators import errors

REMEMBERED_CALLS = 1024
LETTER_BYTES = 2048
CHECK_BYTES = 4
Letters = list[tuple[int, bytes]]  # to whom, what


class Control:
    """One rank's part.

    verdict: the reason that all ranks raise, once there is one. gone: ranks that have left, and why. saw_through: how
    many of the first calls each of those had ended: what it sent in them may still be under way. lost: ranks that
    cannot be reached any more.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.verdict: str | None = None
        self.gone: dict[int, str] = {}
        self.saw_through: dict[int, int] = {}
        self.lost: set[int] = set()
        self._reason: str | None = None
        self._mine: OrderedDict[int, str] = OrderedDict()
        self._theirs: dict[int, tuple[int, str]] = {}

    @property
    def arbiter(self) -> int:
        """Who decides, as far as this rank knows."""
        return min(set(range(self.size)) - self.lost)

    def called(self, number: int, facts: str) -> Letters:
        """This rank makes a call."""
        self._mine[number] = facts
        if len(self._mine) > REMEMBERED_CALLS:
            self._mine.popitem(last=False)
        waiting = self._theirs.pop(number, None)
        return self._compare(number, *waiting) if waiting else []

    def waits(self, number: int, facts: str, peers: list[int]) -> Letters:
        """This rank has waited long for these peers."""
        return [(peer, _letter(kind="waits", rank=self.rank, number=number, facts=facts)) for peer in peers]

    def complain(self, reason: str) -> Letters:
        """This rank has found a reason why a collective cannot proceed; its first one counts."""
        self._reason = self._reason or reason
        if self.verdict is not None:
            return []
        if self.rank == self.arbiter:
            return self._decide(self._reason)
        return [(self.arbiter, _letter(kind="reason", rank=self.rank, reason=self._reason))]

    def lose(self, peer: int) -> Letters:
        """This peer cannot be reached any more, or does not answer: if it was the arbiter, the next one is asked."""
        before = self.arbiter
        self.lost.add(peer)
        return [] if self._reason is None or self.arbiter == before else self.complain(self._reason)

    def leaves(self, why: str, calls: int) -> Letters:
        """This rank exits; its first so many calls are over."""
        return self._to_all(_letter(kind="leaves", rank=self.rank, why=why, calls=calls))

    def receive(self, letter: bytes) -> Letters:
        """A letter has come."""
        content = _content(letter)
        if content is None:
            return self.complain(f"rank {self.rank} got a corrupted control message: the network changes bits")
        if content["kind"] == "reason":  # also by one that is not the arbiter here: the sender has lost those before it
            sender = content["rank"]
            return self._decide(content["reason"]) or [(sender, _letter(kind="verdict", reason=self.verdict))]
        if content["kind"] == "verdict":
            self.verdict = self.verdict or content["reason"]
        elif content["kind"] == "leaves":
            self.gone[content["rank"]], self.saw_through[content["rank"]] = content["why"], content["calls"]
        elif content["kind"] == "waits":
            return self._compare(content["number"], content["rank"], content["facts"])
        return []

    def deserters(self, number: int, peers: list[int]) -> list[int]:
        """Those of the peers that have left and will not take part in this call."""
        return sorted(peer for peer in peers if peer in self.gone and number >= self.saw_through[peer])

    def _compare(self, number: int, rank: int, facts: str) -> Letters:
        mine = self._mine.get(number)
        if mine is None:
            if not self._mine or number > next(reversed(self._mine)):  # to come; one that is long past is forgotten
                self._theirs[number] = (rank, facts)
            return []
        return [] if mine == facts else self.complain(errors.mismatch(number, self.rank, mine, rank, facts))

    def _decide(self, reason: str) -> Letters:
        if self.verdict is not None:
            return []
        self.verdict = reason
        return self._to_all(_letter(kind="verdict", reason=reason))

    def _to_all(self, letter: bytes) -> Letters:
        return [(peer, letter) for peer in range(self.size) if peer != self.rank and peer not in self.lost]


def _content(letter: bytes) -> dict[str, Any] | None:
    """What a letter says; None for one that is not as it was written."""
    check, text = letter[:CHECK_BYTES], letter[CHECK_BYTES:]
    if zlib.crc32(text).to_bytes(CHECK_BYTES, "big") != check:
        return None
    content: dict[str, Any] = json.loads(text)
    return content


def _letter(**content: object) -> bytes:
    text = json.dumps(content).encode()
    letter = zlib.crc32(text).to_bytes(CHECK_BYTES, "big") + text
    if len(letter) <= LETTER_BYTES:
        return letter
    longest = max(content, key=lambda key: len(str(content[key])))
    long = str(content[longest])
    return _letter(**{**content, longest: long[: len(long) // 2] + "…"})
