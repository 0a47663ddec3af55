"""Generations: groups of ranks that follow one another, and how a rank comes into one, into the next, and out.

Each is one record on a `Board`, which only compare-and-swap replaces: so there is one newest generation, whoever sees
what. A rank that is not in it is told so at its next call, and may join anew.
"""

import logging
import math
import random
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from communicators import errors
from communicators.communicator import Communicator, Work, check_connections, check_timeout, run
from communicators.elastic import transfer
from communicators.elastic.board import MOST_COUNTED, PROBE_SECONDS, RECORD, Board, Record, Said
from communicators.elastic.dealer import Dealer
from communicators.elastic.dealing import Change
from communicators.elastic.store import board_of
from communicators.errors import CollectiveError
from communicators.schedule import Schedule
from communicators.schedules.dense import allgather_blocks
from communicators.signals import OnSignal, Signals

T = TypeVar("T")

POLL_SECONDS = 0.005
LOOK_SECONDS = 0.5
"""Longest interval between two looks at the board by ranks that wait for each other."""
WINDOW_SECONDS = 0.4
"""Longest wait for a rank beyond the time-out, because ranks do not learn of a loss at one moment."""
LAST_CALL_SECONDS = 10.0
"""Wait of the first generation for ranks that were to come, but have not."""
MOST_FAILURES = 5
"""Attempts at one exchange; and of a newcomer to join, further and further apart: each may make all others wait."""
BEAT_SECONDS = 0.05
"""Longest interval between two looks of a newcomer, by which it shows that it is there."""
SAY_SECONDS = 10.0
"""Interval between two messages of a rank that waits for others to come."""
WAITING, LEAVES = MOST_COUNTED, 2 * MOST_COUNTED  # flags of a commit's word, above the number of batches drawn

logger = logging.getLogger("communicators.elastic")


class LeftOutError(CollectiveError):
    """The others have gone on without this rank; it may join anew, by a new `Elastic` and a new optimizer."""


class Membership(Communicator):
    """Communicator of the newest generation's ranks; see `Elastic` for its arguments.

    Attributes:
        generation: Number of the current group, from 1 on; `rank` and `size` are those in it.
    """

    def __init__(
        self,
        meeting: Any = None,
        *,
        at_least: int = 1,
        start_with: int | None = None,
        timeout: float = 60.0,
        patience: float = math.inf,
        connections: int = 1,
        name: str = "thinwire",
    ) -> None:
        if isinstance(at_least, bool) or not isinstance(at_least, int) or at_least < 1:
            raise ValueError(f"at_least is {at_least!r}, expected the fewest ranks that train, 1 or more")
        self._board: Board = board_of(meeting, name)
        self._start_with = self._board.launched if start_with is None else start_with
        self._at_least, self._patience, self._timeout = at_least, patience, check_timeout(timeout)
        self._board.patience, self._board.connections = patience, check_connections(connections)
        self._alike = f"at_least={at_least}, timeout={timeout:g}, connections={connections}"
        self._record, self._taken = Record(), 0
        self._inner: Communicator | None = None
        self._names: tuple[str, ...] = ()  # members of `_inner`, which may be those of an older record
        self._unserved: tuple[str, ...] = ()  # newcomers of this generation, until they have a state
        self._given: Mapping[str, Any] | None = None  # state that a survivor gave to this newcomer
        self._taking: Work[Any] | None = None
        self._no_state: CollectiveError | None = None  # why it does not come
        self._failures = 0  # attempts of this newcomer to take a state
        self.leaving = self._over = self._joining = self._failed = False
        self._thread = 0  # of the last commit, or of who began to draw since
        self._words = [0]  # of all ranks, in the last commit
        self._dealer = Dealer()
        self._first_size = 0
        self._sent = [0, 0]  # bytes and messages of former generations

    @property
    def generation(self) -> int:  # type: ignore[override]
        """Number of the current group."""
        self._last  # noqa: B018 - enters
        return self._record.generation

    @property
    def joining(self) -> bool:  # type: ignore[override]
        """Whether this rank has come to a running training, whose state is here, and was not taken over yet."""
        self.group  # noqa: B018 - enters
        while self._joining and not self._has_state():
            self._join_anew()
        return self._joining

    @property
    def newcomer(self) -> bool:  # type: ignore[override]
        """Whether it has come to a running training whose state is here, or still under way."""
        self.group  # noqa: B018 - enters
        return self._joining

    @property
    def members(self) -> tuple[str, ...]:
        """Names of the current ranks."""
        return self._record.members

    @property
    def changing(self) -> bool:
        """Whether others wait to be let in, or this rank is to leave."""
        return self.leaving or bool(self._newcomers())

    @property
    def rank(self) -> int:  # type: ignore[override]
        """Place of this rank among the current ones."""
        return self._last.rank

    @property
    def size(self) -> int:  # type: ignore[override]
        """Number of the current ranks."""
        return self._last.size

    @property
    def first_size(self) -> int:
        self._last  # noqa: B018 - enters
        return self._first_size

    @property
    def bytes_sent(self) -> int:  # type: ignore[override]
        """Bytes sent in all generations."""
        return self._sent[0] + (self._inner.bytes_sent if self._inner else 0)

    @property
    def messages_sent(self) -> int:  # type: ignore[override]
        """Messages sent in all generations."""
        return self._sent[1] + (self._inner.messages_sent if self._inner else 0)

    @property
    def awaited(self) -> Mapping[int, float]:  # type: ignore[override]
        """Seconds for which messages of each current rank were awaited."""
        return self._inner.awaited if self._inner else {}

    @property
    def group(self) -> Communicator:
        """Fixed communicator of the current ranks, which goes no further than their generation."""
        if self._over:
            raise CollectiveError(
                "this rank has left, as leave() asks: where leaving is True, end a loop over epochs, and call neither "
                "finish() nor another exchange"
                if self.leaving
                else "this Elastic is closed, or was left out of its group: make a new Elastic, and a new optimizer"
            )
        if self._inner is None:
            self._enter()
        assert self._inner is not None
        return self._inner

    @property
    def _last(self) -> Communicator:
        """Communicator of the current ranks; where this one has gone, of its last ones, which it may still name."""
        return self._inner if self._over and self._inner is not None else self.group

    def run(self, schedule: Schedule[T], *, facts: str, timeout: float, device: torch.device | None = None) -> T:
        return self.group.run(schedule, facts=facts, timeout=timeout, device=device)

    def start(
        self, schedule: Schedule[T], *, facts: str, timeout: float, device: torch.device | None = None
    ) -> Work[T]:
        return self.group.start(schedule, facts=facts, timeout=timeout, device=device)

    def native_allreduce(self, tensor: Tensor, *, facts: str) -> Tensor | None:
        return self.group.native_allreduce(tensor, facts=facts)

    def clock(self) -> float:
        return self._board.clock()

    def elapse(self, seconds: float) -> None:
        self.group.elapse(seconds)

    def duplicate(self) -> Communicator:
        raise NotImplementedError("ranks of an Elastic change, those of a duplicate would not: use the Elastic itself")

    def signals(self, on_signal: OnSignal | None = None) -> Signals:
        del on_signal
        raise NotImplementedError("ranks of an Elastic change, those that signals connect would not")

    def _enter(self) -> None:
        """Enters a generation, with the state of one who trains if this rank came later; it may try again."""
        try:
            self._wait_to_enter()
        except BaseException:
            if self._inner is None:
                self._board.retire()
            raise

    def _wait_to_enter(self) -> None:
        """Waits until this rank is in a generation."""
        began = told = self.clock()
        empty = math.inf
        while self._inner is None:
            self._board.wait_in_line()
            record = self._board.record()
            empty = math.inf if record.generation else min(empty, self.clock())
            if self._board.name in record.members:
                self._come_in(record)
                continue
            self._refuse_unlike(record)
            if not record.members and (record.generation or self.clock() >= empty + self._board.settling):
                self._found(began, record)
            now = self.clock()
            if now - began > self._patience:
                lacks = self._lacks(record)
                self._board.leave_line()
                raise TimeoutError(f"not within {self._patience:g} s: {lacks}")
            if now - told > SAY_SECONDS:
                told = now
                logger.warning("%s", self._lacks(record))
            self._board.pause(max(POLL_SECONDS, min((now - began) / 8, BEAT_SECONDS)))

    def _found(self, began: float, ended: Record) -> None:
        """Begins the first generation, once enough ranks have come. ended: of a training before this one."""
        waiting, late = self._board.waiting(), self.clock() - began > LAST_CALL_SECONDS
        if self._board.name in waiting and len(waiting) >= max(self._at_least, 0 if late else self._start_with):
            founded = Record(ended.generation + 1, waiting, run=self._board.name, alike=self._alike)
            self._board.swap(RECORD, ended.text(), founded.text())

    def _come_in(self, record: Record) -> None:
        """Connects to the ranks of a generation that this one is in; to a newcomer a state is under way then."""
        self._first_size = len(record.members)
        self._board.leave_line()
        self._taken, self._joining = record.taken, self._board.name in record.joined
        try:
            self._connect(record)
            self._refuse_unlike(record)
            if self._joining:
                self._begin_to_take()
        except CollectiveError as error:
            self._refuse_unlike(record)
            self._note_failure(record, error)
            if self._joining:
                self._come_again(error)
                return
            self._regroup(self.clock())  # fewer wait for others once they have a state to give

    def _refuse_unlike(self, record: Record) -> None:
        """Leaves the others, who go on, where their settings are not this rank's."""
        if record.members and record.alike != self._alike:
            self._board.leave_line()
            self._go()
            raise ValueError(
                f"this rank's Elastic has {self._alike}, that of {record.run}, who began, {record.alike}: give all "
                "ranks the same"
            )

    def _come_again(self, error: CollectiveError) -> None:
        """Has a newcomer leave a generation that has failed, and wait in line anew: later, if it may be the reason."""
        here = self._say_out()
        others = [name for name, said in here.items() if said.failed and name != self._board.name]
        then = self._board.record()
        if then.generation > self._record.generation and not set(self._record.settled) <= set(then.members):
            others = []  # without another one, which is reason enough
        late = self._inner is not None and (self._inner.failure or "").startswith("timed out")
        if (
            late
            or isinstance(error, transfer.UnreadableError)
            or (self._inner is None and self._board.unreached(self._record.generation + 1, others))
        ):
            self._failures += 1  # its state came too late, or it does not reach somebody; another's death is no reason
            if self._failures >= MOST_FAILURES:
                self._over = True
                raise CollectiveError(
                    f"{self._board.name} could not join in {MOST_FAILURES} attempts, at last because {error}; it must "
                    f"reach all other ranks, and where the state takes longer than timeout={self.timeout:g} s, give "
                    "more on all ranks"
                ) from error
            apart = 0.5 + random.Random(self._board.name).random()  # two that do not reach each other part
            self._board.pause(apart * self.timeout * 2 ** (self._failures - 1))  # every attempt makes all others wait
        if self._inner is not None:
            self._retire(self._inner)
        self._inner, self._record, self._board.name, self._failed = None, Record(), "", False
        self._given = None

    def _join_anew(self) -> None:
        """Has a newcomer whose state did not come leave, and come into another generation."""
        error = self._no_state or CollectiveError("a rank was lost before its state had come")
        self._no_state = None
        self._note_failure(self._record, error)
        self._come_again(error)
        self.group  # noqa: B018 - enters

    def _has_state(self) -> bool:
        """Waits for a newcomer's state; False: it does not come."""
        if self._given is None:
            try:
                self._await_state()
            except CollectiveError as error:
                self._no_state = error
                return False
        return True

    def _say_out(self) -> dict[str, Said]:
        """Tells that this newcomer leaves; returns what all who come in time say then."""
        board, record, until = self._board, self._record, self.clock() + self.timeout + WINDOW_SECONDS
        said = Said(record.taken, committed=(0,) * len(record.members), out=True, failed=self._inner is None)
        board.say(record.generation + 1, said)
        while len(here := board.said(record.generation + 1, record.members)) < len(record.members):
            if self._inner is not None or self.clock() > until or board.record().generation > record.generation:
                break  # there is no next generation without all who go on
            board.pause(POLL_SECONDS)
        return here

    def _begin_to_take(self) -> None:
        """Begins to take the state that one of the others gives to this newcomer."""
        pair, name = [self._donor_of(self._board.name), self._last.rank], self._board.name
        self._taking = self._last.aside(transfer.take(), pair, facts=f"state for {name}")
        self._began_to_take = self.clock()

    def _await_state(self) -> None:
        """Waits for this newcomer's state. Raises CollectiveError where who gives it is gone, and others may be."""
        donor, name, taking = self._donor_of(self._board.name), self._board.name, self._taking
        assert taking is not None
        while not taking.is_completed():
            if self.group.failure is not None or donor in self.group.ended:
                raise CollectiveError(f"rank {donor}, which was to give its state to {name}, is gone")
            self._board.pause(POLL_SECONDS)
        file = taking.wait()
        given, nbytes = transfer.unpacked(file), file.getbuffer().nbytes
        try:
            self._dealer.load(given["dealer"])
        except (KeyError, TypeError, ValueError) as error:
            raise transfer.UnreadableError(errors.describe(error)) from error
        self._given, took = given, self.clock() - self._began_to_take
        logger.warning("%s took over %d bytes of state from rank %d in %.2f s", name, nbytes, donor, took)

    def _donor_of(self, name: str) -> int:
        """Rank that gives its state to a newcomer: another one every time."""
        olds, turn = self._record.settled, self._record.generation + self._record.joined.index(name)
        return self.members.index(olds[turn % len(olds)])

    def _lacks(self, record: Record) -> str:
        if record.members:
            return (
                f"{self._board.name} waits for the {len(record.members)} ranks that train to let it in after a step; "
                "if none of them lives any more, start the meeting place anew, or give another name="
            )
        waiting = self._board.waiting()
        return (
            f"{self._board.name} waits for others: {len(waiting)} have come {list(waiting)}, at_least={self._at_least}"
        )

    def _go(self) -> None:
        """Leaves at once."""
        self._tell_end()
        if self._inner is not None:
            self._inner.retire()

    def _tell_end(self) -> None:
        """Tells the others that this rank goes; the last one ends the training, so that whoever comes begins anew."""
        self._board.retire()
        if self._over or self._inner is None:
            self._over = True
            return
        self._over, number = True, self._record.generation + 1
        self._board.say(number, Said(self._taken, committed=self._committed, out=True))
        here = self._board.said(number, self.members)
        if all(name in here and here[name].out for name in self.members):
            self._board.swap(
                RECORD, self._record.text(), Record(number, run=self._record.run, alike=self._alike).text()
            )

    def _commit(self) -> None:
        """Comes through once all ranks hold the result; tells what every rank has drawn, and who waits."""
        opens = self._words == [0] and self._record.joined  # to newcomers who may have no state yet
        word = self._dealer.drawn
        if not opens:  # or the group would change before they could answer
            word |= (LEAVES if self.leaving else 0) | (WAITING if self.rank == 0 and self._newcomers() else 0)
        own = torch.tensor([word], device="cpu").view(torch.uint8)
        blocks = allgather_blocks(own, [own.numel()] * self.size, self.rank, self.size)
        said = run(blocks, self, facts="first commit" if opens else f"commit{self._dealer.facts}")
        self._words = [int(block.clone().view(torch.int64)) for block in said]
        self._taken, self._thread = self._taken + 1, threading.get_ident()

    def _refuse_other(self, error: CollectiveError) -> None:
        """Raises an error that is no loss of a rank; where the group has failed by it, this rank goes."""
        failure = None if self._inner is None else self._inner.failure
        if self._inner is None or not errors.is_loss(failure or str(error)):  # the error alone: in a duplicate of it
            if failure is not None:
                self._tell_end()  # whoever comes would wait for this group
            raise error

    def _regroup(self, began: float, *, holds: bool = False, admits: bool = False) -> bool:
        """Goes on in the next generation; returns whether a result that this rank holds stands.

        began: when this rank came to the exchange: it waits for others as long as from then on they have time.
        """
        keeps = False
        while True:
            record = self._agreed(began, holds and not keeps, admits)
            keeps = keeps or (holds and record.taken > self._taken)
            self._taken = record.taken
            lost = [name for name in self.members if name not in record.members]
            self._tell(record, lost)
            try:
                self._connect(record)
                return keeps
            except CollectiveError as error:
                self._note_failure(record, error)
                began = self.clock()

    def _note_failure(self, record: Record, error: CollectiveError) -> None:
        """Takes note of a generation that did not come together."""
        logger.warning("generation %d does not come together: %s", record.generation, error)
        self._record, self._failed, self._words = record, True, [0]

    def _agreed(self, began: float, holds: bool, admits: bool) -> Record:
        """Record of the next generation, once there is one."""
        number, board = self._record.generation + 1, self._board
        waiting = self._newcomers() if admits and self.members[0] == board.name else ()
        own = Said(self._taken, holds, self._dealer.drawn, self._committed, waiting, failed=self._failed)
        board.say(number, own)
        said = told = self.clock()
        until = max(began + self.timeout, told) + WINDOW_SECONDS  # others may have begun to wait later than this rank
        while (record := board.record()).generation < number and record.run in ("", self._record.run):
            here = board.said(number, self.members)
            if record.generation < self._record.generation or board.name not in here:  # a new Store, which knows less
                board.swap(RECORD, record.text(), self._record.text())
                board.say(number, own)
            elif self._propose(number, here, until, admits):
                continue
            if self.clock() - said > self._patience:
                raise TimeoutError(f"not within {self._patience:g} s: {self._awaited(number, admits)}")
            if self.clock() - told > SAY_SECONDS:
                told = self.clock()
                logger.warning("%s", self._awaited(number, admits))
            board.pause(self._interval(said, until))
        if board.name not in record.settled:  # the others may take one who was slow to come for a newcomer
            self._over = True
            board.retire()
            if self._inner is not None:
                self._retire(self._inner)
            others = f"of {list(record.members)}" if record.members else "with which the training has ended"
            raise LeftOutError(
                f"{board.name} was left out of generation {record.generation} {others}: it did not answer for "
                f"{self.timeout:g} s, or its connections were lost; make a new Elastic and a new optimizer to join anew"
            )
        return record

    def _interval(self, began: float, until: float) -> float:
        """Seconds to the next look at the board: fewer and fewer looks, but one when there is no more time."""
        now = self.clock()
        seldom = min((now - began) / 8, LOOK_SECONDS)
        return max(POLL_SECONDS, min(seldom, until - now) if now < until else seldom)

    @property
    def _committed(self) -> tuple[int, ...]:
        drawn = tuple(word & (WAITING - 1) for word in self._words)
        return drawn if len(drawn) == len(self.members) else (0,) * len(self.members)

    def _propose(self, number: int, here: Mapping[str, Said], until: float, admits: bool) -> bool:
        """Ends the announcements for a generation, if nobody is left to wait for; returns whether it tried."""
        old = self._record
        goes_on = connected({name: said.unreached or () for name, said in here.items() if not said.out})
        gone = self._gone() | (set(old.joined) if self._failed else set())  # a newcomer leaves what has failed
        late = [name for name in old.members if name not in here and name not in gone]
        if (late and self.clock() < until) or not self._probed(number, here, until):
            return False
        joined = [name for said in here.values() for name in said.waiting] if admits else []
        if admits and len(goes_on) + len(joined) < self._at_least:
            joined = list(self._newcomers())
            if len(goes_on) + len(joined) < self._at_least:
                return False
        last = max(here.values(), key=lambda said: (said.taken, len(said.committed)))  # or of one who has left since
        taken = last.taken
        drawn = [
            here[name].drawn if name in goes_on else at_commit
            for name, at_commit in zip(old.members, last.committed, strict=True)
        ]
        members = *goes_on, *joined
        record = Record(number, members, tuple(joined), taken, tuple(drawn), last.committed, old.run, old.alike)
        self._board.swap(RECORD, old.text(), record.text())
        return True

    def _probed(self, number: int, here: Mapping[str, Said], until: float) -> bool:
        """Whether all whose generation has failed have told whom they do not reach; tells it for this rank."""
        failed, own = [name for name, said in here.items() if said.failed], here[self._board.name]
        if own.failed and own.unreached is None:
            others = [name for name in failed if name != self._board.name]
            self._board.say(number, replace(own, unreached=self._board.unreached(number, others)))
            return False
        told = all(here[name].unreached is not None or here[name].out for name in failed)
        return told or self.clock() > until + 2 * PROBE_SECONDS

    def _newcomers(self) -> tuple[str, ...]:
        return tuple(name for name in self._board.waiting() if name not in self.members)

    def _gone(self) -> set[str]:
        """Names of ranks whose connections are lost."""
        return {self._names[rank] for rank in self._inner.ended} if self._inner is not None else set()

    def _connect(self, record: Record) -> None:
        """Connects to the ranks of a generation, and retires the connections of the last one."""
        last = self._record
        change = Change(last.members, record.drawn, record.committed) if last.members else None
        rank, commits = record.members.index(self._board.name), record.taken > last.taken
        self._dealer.regroup(record.members, rank, change, commits=commits)  # also where this one fails
        inner = self._board.connect(record, self.timeout)
        inner.timeout = self.timeout
        if self._inner is not None:
            self._retire(self._inner)
        self._sent[0] -= inner.bytes_sent  # of the same counters, in a simulated world
        self._sent[1] -= inner.messages_sent
        self._board.at_exit(self._tell_end)  # the engine departs
        self._record, self._inner, self._words, self._unserved = record, inner, [0], record.joined
        self._names, self._failed = record.members, False

    def _retire(self, inner: Communicator) -> None:
        self._sent[0] += inner.bytes_sent
        self._sent[1] += inner.messages_sent
        inner.retire()

    def _tell(self, record: Record, lost: Iterable[str]) -> None:
        """Logs what has changed, and what was lost."""
        for name in lost:
            logger.warning(
                "generation %d: %d ranks go on without rank %d (%s); %s",
                record.generation,
                len(record.members),
                at := self.members.index(name),
                name,
                "it had not taken part yet, and nothing of it is lost"
                if name in self._record.joined and (self._failed or self._words == [0])  # no commit yet
                else "lost is what it held, its residual (norm unknown) and its part of the block since the last "
                f"exchange; in generation {self._record.generation} it had drawn "
                f"{self._dealer.count(at, record.drawn[at])} by the last commit",
            )
        for name in record.joined:
            logger.warning("generation %d of %d ranks: %s joins", record.generation, len(record.members), name)

    def _awaited(self, number: int, admits: bool) -> str:
        here = self._board.said(number, self.members)
        late = [name for name in self.members if name not in here]
        if late or not admits:
            return f"{self._board.name} waits for {late} to go on in generation {number}"
        left = sum(not said.out for said in here.values())
        return f"{self._board.name} waits for more ranks: {left} are here, at_least={self._at_least}"


def connected(unreached: Mapping[str, Iterable[str]]) -> list[str]:
    """Those of the ranks who all reach each other, without whoever lacks most connections, of several the last."""
    left = list(unreached)
    while lacks := Counter(name for one in left for other in unreached[one] if other in left for name in (one, other)):
        left.remove(max(reversed(left), key=lambda name: lacks[name]))
    return left
