"""One rank's part of the protocol of partial rounds (after Eager-SGD, Li et al., PPoPP 2020)."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from partial_collectives.protocol.events import Action, Grace, Header, Join, Kind, LeftOut, Recover, Signal, Stage
from partial_collectives.protocol.rules import Rules

NEVER = -1


class Machine:
    """Protocol of one rank: rounds are numbered, run one after another, and every rank enters each of them.

    Events are methods; each returns what is to be done, in order. A rank *arrives* at a round when it waits with a
    gradient and has no results to apply, or when it has no more steps for now. The rank drawn for the round counts the
    arrivals and tells all to begin once the quorum is there ("solo": the rank that arrives tells all itself). A rank
    that was told enters with what it holds, even if that is nothing; what is deposited later goes to the next round.
    But a rank that missed `max_staleness` rounds in a row enters with a gradient only: so the round waits for it.
    All of this follows from the headers of earlier rounds, which are the same everywhere.

    A rank that is gone is told to all by every rank that learns of it. All that are left then leave the round that is
    under way and find out who has ended it: if any has, it is over, and the others get its result from there; if none
    has, all take back what they brought, and begin it anew. What a rank that is gone had brought to a round that is
    over is in it; the rest is given up.

    Fragments take turns: a round is of one of them, and takes what was deposited for it alone. A rank gives to the
    round that it enters next, or to the one after that to which it gave last, and to those that it has missed since:
    their turn comes again. One that holds something for a later round is not waited for, and has not ended, whatever
    its stage.

    Differs from the paper: there, late gradients are overwritten, and any rank may be drawn, also one that has ended.

    round: the current one. running: ranks that may be waited for: had more steps, as of the last round.
    missed: rounds in a row that each rank brought nothing to. meetings: rounds that found nobody running;
    met: the last of them; complete: whether nobody was gone in it.
    over: nobody has more steps. members: ranks not known to be gone. recovering: between `Recover` and `recovered`.
    """

    def __init__(self, rank: int, size: int, rules: Rules) -> None:
        self.rank, self.size, self.rules = rank, size, rules
        self.round = 0
        self.stage = Stage.RUNNING
        self.running = self.unfinished = frozenset(range(size))
        self.missed = [0] * size
        self.joined = False
        self.meetings, self.met, self.complete = 0, NEVER, False
        self.members, self.recovering = frozenset(range(size)), False
        self._held = set[int]()  # fragments for which something was deposited
        self._given = NEVER  # last round to which something was given
        self._waits = self._brought = False
        self._told, self._announced, self._granted = NEVER, NEVER, NEVER
        self._arrived: dict[int, set[int]] = {}
        self._actions: list[Action] = []

    @property
    def over(self) -> bool:
        """Whether every rank has finished, and all that was deposited has been in a round."""
        return not self.unfinished

    @property
    def coordinator(self) -> int:
        """Rank that counts the arrivals at the current round."""
        return self.rules.drawn(self.round, self.running)

    def next_fragments(self) -> list[int]:
        """Fragments to which this rank gives: of the next round that it has given nothing to, and of missed ones."""
        enters = self.round + self.joined
        last, count = max(enters, self._given + 1), self.rules.fragments
        missed = range(max(self._given + 1, enters - count + 1), enters)
        return [last % count, *(number % count for number in missed)]

    def deposited(self, *, behind: bool) -> list[Action]:
        """Event: this rank has given to the next fragments.

        behind: it has results to apply, so it does not wait for another.
        """
        self._held.update(self.next_fragments())
        self._given = max(self.round + self.joined, self._given + 1)
        self._waits = not behind
        return self._go_on()

    def waits(self) -> list[Action] | None:
        """Event: this rank waits for a round with what it has given; None where nothing of it is under way."""
        if not (self._held or (self.joined and self._brought)):
            return None
        self._waits = bool(self._held)
        return self._go_on()

    def rested(self, stage: Stage, fragments: Iterable[int] = ()) -> list[Action]:
        """Event: this rank has no more steps for now, or none at all. fragments: to which it has given its last."""
        self.stage = stage
        self._held.update(fragments)
        return self._go_on()

    def heard(self, source: int, kind: Kind, round_: int) -> list[Action]:
        """Event: a signal came."""
        if kind is Kind.GONE:
            return self.gone(round_)
        if source not in self.members:  # others may not get it; who is drawn now counts the arrivals again
            return []
        if round_ > self.round + self.joined:  # a round ends with all members: nobody can be so far ahead
            return []
        if kind is Kind.BEGIN:
            self._told = max(self._told, round_)
        elif round_ >= self.round:
            self._arrived.setdefault(round_, set()).add(source)
        return self._go_on()

    def grace_over(self, round_: int) -> list[Action]:
        """Event: the round has waited long enough for others."""
        self._granted = max(self._granted, round_)
        return self._go_on()

    def gone(self, rank: int) -> list[Action]:
        """Event: a rank has died or left, by what this rank or another one has seen."""
        if rank == self.rank:
            return [LeftOut()]
        if rank not in self.members:
            return []
        self.members, self.recovering = self.members - {rank}, True
        told = [Signal(peer, Kind.GONE, rank) for peer in range(self.size) if peer != self.rank]
        return [*told, Recover(self.members, rank)]

    def recovered(self, headers: Sequence[Header] | None, *, behind: bool = True) -> list[Action]:
        """Event: all members have ended as many rounds. headers: of the one that others had ended before this rank."""
        self.recovering = False
        if headers is None:
            if self.joined and self._brought:
                self._held.add(self._fragment)
            self.joined = False
        else:
            self._end_round(headers, behind)
        self.unfinished &= self.members
        self.running = self.running & self.members or self.unfinished
        self._announced = NEVER  # to whom is drawn now
        self._actions = []
        if self._told >= self.round:
            self._begin()  # who told this rank may be gone before it told the others
        return self._actions + self._go_on()

    def completed(self, headers: Sequence[Header], *, behind: bool = True) -> list[Action]:
        """Event: the current round's collective is over. headers: of all ranks, also of those that are gone.

        behind: whether this rank has results to apply before it waits for another round.
        """
        self._end_round(headers, behind)
        return self._go_on()

    def begin_at(self, number: int) -> None:
        """Begins with the round of this number."""
        self.round, self._given = number, number - 1

    def state(self) -> dict[str, Any]:
        """State between rounds: where to go on, the same on all ranks but for the stage."""
        return {
            "round": self.round,
            "seed": self.rules.seed,
            "missed": list(self.missed),
            "running": sorted(self.running),
            "unfinished": sorted(self.unfinished),
            "gone": sorted(set(range(self.size)) - self.members),
            "stage": int(self.stage),
            "held": sorted(self._held),
            "given": self._given,
            "waits": self._waits,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state` was taken; after the end of a run all ranks begin another one.

        Ranks that were gone are here again: each goes on from a peer's state.
        """
        everyone, back = frozenset(range(self.size)), frozenset(state.get("gone", ()))
        self.round, self.missed, self._held = state["round"], list(state["missed"]), set(state["held"])
        self._given, self._waits = state["given"], state["waits"]
        self.running = back.union(state["running"]) if state["running"] else everyone
        self.unfinished = back.union(state["unfinished"]) if state["unfinished"] else everyone
        self.stage = Stage(state["stage"]) if state["unfinished"] else Stage.RUNNING

    @property
    def _fragment(self) -> int:
        return self.round % self.rules.fragments

    def _end_round(self, headers: Sequence[Header], behind: bool) -> None:
        running = frozenset(r for r, header in enumerate(headers) if header.stage is Stage.RUNNING)
        self.unfinished = frozenset(r for r, header in enumerate(headers) if header.stage < Stage.FINISHED)
        if not running:
            self.meetings, self.met = self.meetings + 1, self.round
            self.complete = all(header.stage is not Stage.GONE for header in headers)
        self.running = running or self.unfinished
        self.missed = [
            missed + 1 if r in running and not headers[r].contributes else 0 for r, missed in enumerate(self.missed)
        ]
        if not running and self.stage is Stage.PAUSED:
            self.stage = Stage.RUNNING
            self._given = max(self._given, self.round)  # it owes nothing
        if any(header.contributes for header in headers):
            self._waits = self._waits and not behind
        self._arrived.pop(self.round, None)
        self.round += 1
        self.joined = False

    def _go_on(self) -> list[Action]:
        """Actions that follow from all that is known."""
        self._actions = []
        if not self.joined and not self.over and not self.recovering:
            if self._told < self.round:
                self._arrive()
                self._count()
            if self._told >= self.round and not self._is_waited_for():
                self._join()
        return self._actions

    def _arrive(self) -> None:
        at_rest = self.stage is not Stage.RUNNING
        waits = bool(self._held) and self._waits
        if self._announced == self.round or self.rank not in self.running or not (waits or at_rest):
            return
        self._announced = self.round
        if self.rules.alone:
            self._begin()
        elif self.coordinator == self.rank:
            self._arrived.setdefault(self.round, set()).add(self.rank)
        else:
            self._actions.append(Signal(self.coordinator, Kind.ARRIVED, self.round))

    def _count(self) -> None:
        """Counts arrivals where this rank is the coordinator."""
        if self._told >= self.round or self.coordinator != self.rank:
            return
        arrived = self._arrived.get(self.round, set()) & self.running
        if not self.rules.quorum_is_there(arrived, self.running, self.rank):
            return
        if not self.rules.grace or self._granted == self.round or arrived == self.running:
            self._begin()
        else:
            self._actions.append(Grace(self.round))

    def _begin(self) -> None:
        self._told = self.round
        self._actions += [Signal(peer, Kind.BEGIN, self.round) for peer in sorted(self.members - {self.rank})]

    def _is_waited_for(self) -> bool:
        """Whether the round must not go on without a gradient of this rank."""
        behind = self.missed[self.rank] >= self.rules.max_staleness
        return behind and not self._held and self.stage is Stage.RUNNING

    def _join(self) -> None:
        self.joined, self._brought = True, self._fragment in self._held
        self._held.discard(self._fragment)
        stage = Stage.RUNNING if self._held else self.stage  # others wait until all of it has been in a round
        self._actions.append(Join(self.round, stage, self._brought, self._brought and self._waits))
