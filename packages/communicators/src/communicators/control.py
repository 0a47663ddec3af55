"""How ranks come to the same reason when a collective cannot proceed: letters on a channel beside the data.

Pure: letters in, letters out; a world only carries them. Rank 0 is the arbiter: the first reason that reaches it
becomes the verdict that every rank raises.

- A rank that has waited for a while writes `waits` to the peers that it waits for. They compare its facts with what
  they called under the same number; a later call is remembered and compared when they come to it.
- A rank that finds a reason (other facts, a time-out, an exception, a peer that has left) writes it to the arbiter,
  which writes the verdict to all.
- A rank that exits writes `leaves` to all.
"""

from __future__ import annotations

import json
from collections import OrderedDict

from communicators import errors

ARBITER = 0
REMEMBERED_CALLS = 1024
LETTER_BYTES = 2048
Letters = list[tuple[int, bytes]]  # to whom, what


class Control:
    """One rank's part.

    verdict: the reason that all ranks raise, once there is one. gone: ranks that have left, and why. saw_through: how
    many of the first calls each of those had ended: what it sent in them may still be under way.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.verdict: str | None = None
        self.gone: dict[int, str] = {}
        self.saw_through: dict[int, int] = {}
        self._mine: OrderedDict[int, str] = OrderedDict()
        self._theirs: dict[int, tuple[int, str]] = {}

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
        """This rank has found a reason why a collective cannot proceed."""
        if self.rank != ARBITER:
            return [(ARBITER, _letter(kind="reason", reason=reason))]
        if self.verdict is None:
            self.verdict = reason
            return self._to_all(_letter(kind="verdict", reason=reason))
        return []

    def leaves(self, why: str, calls: int) -> Letters:
        """This rank exits; its first so many calls are over."""
        return self._to_all(_letter(kind="leaves", rank=self.rank, why=why, calls=calls))

    def receive(self, letter: bytes) -> Letters:
        """A letter has come."""
        content = json.loads(letter)
        if content["kind"] == "reason":
            return self.complain(content["reason"])
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

    def _to_all(self, letter: bytes) -> Letters:
        return [(peer, letter) for peer in range(self.size) if peer != self.rank]


def _letter(**content: object) -> bytes:
    letter = json.dumps(content).encode()
    if len(letter) <= LETTER_BYTES:
        return letter
    longest = max(content, key=lambda key: len(str(content[key])))
    text = str(content[longest])
    return _letter(**{**content, longest: text[: len(text) // 2] + "…"})
