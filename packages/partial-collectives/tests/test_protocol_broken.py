"""Each rule of the protocol is needed: without it, some order of events loses, doubles, disagrees or hangs."""

from __future__ import annotations

import inspect
import random

import interleaving
import pytest
from interleaving import BrokenRuleError, Play, case_of, random_case
from partial_collectives.protocol import machine

MOST = 6000
BROKEN = {
    "what is deposited during a round is taken for its own": (
        "        self.round += 1\n        self.joined = False",
        "        self.round += 1\n        self.joined = False\n        self._held.clear()",
    ),
    "who ends is no arrival": ("(waits or at_rest)", "waits"),
    "draws are among all ranks": (
        "self.rules.drawn(self.round, self.running)",
        "self.rules.drawn(self.round, range(self.size))",
    ),
    "those that have ended are waited for": (
        " and not self._held and self.stage is Stage.RUNNING",
        " and not self._held",
    ),
    "staleness has no bound": ("return behind and not self._held and", "return False and"),
    "one round more may be missed": (">= self.rules.max_staleness", "> self.rules.max_staleness"),
    "signals of the next round are forgotten": (
        "elif round_ >= self.round:",
        "elif round_ == self.round:",
    ),
    "a beginning that comes early is forgotten": (
        "self._told = max(self._told, round_)",
        "self._told = round_ if round_ == self.round else self._told",
    ),
    "a signal that comes twice or late undoes a later one": (
        "self._told = max(self._told, round_)",
        "self._told = round_",
    ),
    "a rank that waits through an empty round is not heard again": (
        "        if any(header.contributes for header in headers):\n            self._waits = self._waits and",
        "        self._waits = False and",
    ),
    "the last arrival at rest meets nobody": (
        "            self.stage = Stage.RUNNING\n",
        "",
    ),
    "after a meeting those draw that came last": (
        "self.running = running or self.unfinished",
        "self.running = running or self.running",
    ),
    "the quorum may be one less": (
        "self.rules.quorum_is_there(arrived, self.running, self.rank)",
        "self.rules.quorum_is_there(arrived | {(self.rank + 1) % self.size}, self.running, self.rank)",
    ),
    "the coordinator does not tell the others": (
        "self._actions += [Signal(peer, Kind.BEGIN, self.round) for peer in sorted(self.members - {self.rank})]",
        "self._actions += []",
    ),
    "who brings something says that it does not": (
        "Join(self.round, stage, self._brought,",
        "Join(self.round, stage, self._brought and self._waits,",
    ),
    "the run is over once this rank has finished": (
        "return not self.unfinished",
        "return self.rank not in self.unfinished",
    ),
    "a rank arrives before it has a gradient": ("(waits or at_rest)", "True"),
    "nobody tells on that a rank is gone": (
        "return [*told, Recover(self.members, rank)]",
        "return [Recover(self.members, rank)]",
    ),
    "who was told to begin by one that is gone keeps it to itself": (
        "        if self._told >= self.round:\n            self._begin()",
        "        if False:\n            self._begin()",
    ),
    "what was brought to a round that nobody has ended is forgotten": (
        "                self._held.add(self._fragment)",
        "                pass",
    ),
    "what was brought to a round that others have ended is brought again": (
        "            self._end_round(headers, behind)\n        self.unfinished",
        "            self._end_round(headers, behind)\n            self._held.add(0)\n        self.unfinished",
    ),
    "arrivals are not told to the next coordinator": ("        self._announced = NEVER  # to", "        pass  # to"),
    "those that are gone are drawn": (
        "self.running = self.running & self.members or self.unfinished",
        "self.running = self.running or self.unfinished",
    ),
    "those that are gone are waited for to finish": ("self.unfinished &= self.members", "pass"),
    "the next round begins before it is known which are over": (
        "not self.over and not self.recovering",
        "not self.over",
    ),
    "a rank that holds something for another fragment says that it has ended": (
        "stage = Stage.RUNNING if self._held else self.stage",
        "stage = self.stage",
    ),
    "what is for another fragment is said to be brought": (
        "self._brought = True, self._fragment in self._held",
        "self._brought = True, bool(self._held)",
    ),
    "those that come back are not waited for to finish": (
        'back.union(state["unfinished"])',
        'frozenset(state["unfinished"])',
    ),
    "those that come back are not waited for": ('back.union(state["running"])', 'frozenset(state["running"])'),
}


def broken(old, new):
    """The machine without a rule."""
    source = inspect.getsource(machine)
    assert source.count(old) == 1, old
    scope = {"__name__": machine.__name__}
    exec(compile(source.replace(old, new), "broken", "exec"), scope)
    return scope["Machine"]


def first_failure(kind, most=MOST):
    """What the first of so many cases says that does not hold; None where all do."""
    draw = random.Random(7)
    for number in range(most):
        try:
            Play(random_case(draw, 1 + number % 5), kind).run()
        except BrokenRuleError as error:
            return str(error)
    return None


@pytest.mark.few(2)
@pytest.mark.parametrize("rule", BROKEN)
def test_without_a_rule(rule, monkeypatch):
    monkeypatch.setattr(interleaving, "LONGEST", 20_000)
    kind = broken(*BROKEN[rule])
    said = first_failure(kind)
    assert said is not None
    with pytest.raises(BrokenRuleError):  # and the printed line plays it again
        Play(case_of(said.split("interleaving.py '")[1].rstrip("'")), kind).run()


def test_with_all_rules():
    """More of them: test_protocol.py."""
    assert first_failure(machine.Machine, most=MOST // 15) is None
