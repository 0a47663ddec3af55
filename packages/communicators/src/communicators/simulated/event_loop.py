"""The event loop of a simulated world: everything that happens, in order of virtual time."""

from __future__ import annotations

import heapq
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any, TypeAlias, TypeVar

import torch

from communicators import errors
from communicators.background.call import Call
from communicators.communicator import Work
from communicators.errors import CollectiveError
from communicators.schedule import Elapse, Payload, Received, Round, Schedule
from communicators.signals import Attempt
from communicators.simulated.network import Conditions, Corrupts, Dies, Message, Ports
from communicators.simulated.ranks import Context, RankThread, Turns, Watch
from communicators.simulated.timeline import Sent, Span, Timeline

T = TypeVar("T")
Action: TypeAlias = Callable[[], None]
Name: TypeAlias = tuple[Context, int]
"""Name of a call: its communicator, and its number there."""
Address = tuple[int, Name, int]  # sender, call, tag
POLL_SECONDS = 50e-6
"""Virtual cost of one `is_completed()`, or one `poll()` of signals."""


class SimulatedCall(Work[Any], Attempt):
    """A call or an attempt in the loop: what its current round still lacks, and who waits for its end.

    Waiting for it, or for its futures, lets the other ranks go on; seconds are virtual.
    """

    ended: float | None = None
    error: CollectiveError | None = None
    value = lost = None  # lost: signals tell which ranks have departed
    bytes_sent = 0

    def __init__(self, loop: EventLoop, call: Call, context: Context, places: Sequence[int]) -> None:
        self._loop, self.call, self.rank, self.context, self.began = loop, call, call.rank, context, loop.now
        self._places, self.met = places, tuple[int, ...]()  # met: places of its peers
        self.name: Name = (context, call.number)
        self.done = False
        self.lacks: dict[int, tuple[int, int]] = {}  # peer -> tag, capacity
        self.unsent = -1  # -1: not in a round
        self.posted = 0.0  # when its current round was
        self.received: Received = {}
        self.callbacks: list[Action] = []

    @property
    def peers(self) -> list[int]:  # type: ignore[override]
        return [self._places.index(place) for place in self.met]

    def wait(self, timeout: float | None = None) -> Any:
        self._loop.wait(self, timeout)
        if self.error is not None:
            raise CollectiveError(str(self.error)) from self.error.__cause__
        return self.value

    def is_completed(self) -> bool:
        self._loop.sleep(self.rank, POLL_SECONDS)
        return self.done

    def when_over(self, callback: Action) -> None:
        self._loop.wish(lambda: callback() if self.done else self.callbacks.append(callback))

    def get_future(self, *beside: Work[Any]) -> torch.futures.Future[Any]:
        def result() -> Any:
            for work in beside:
                with suppress(CollectiveError):  # its own `wait` raises it again
                    work.wait()
            return self.wait()

        return _SimulatedFuture(result)

    def cancel(self) -> None:
        self._loop.wish(lambda: self._loop.tear(self))

    def waits(self) -> str:
        """Phrase that says who waits for whom."""
        return self.call.waits(self.lacks)


class EventLoop:
    """The events of one run of a world.

    Rank threads call `submit`, `sleep` and `wait`. These only enter a wish; the loop's thread carries it out as soon
    as it has the baton back, so that `draw` is always called there (hypothesis asks for that). turns: see `RankThread`.
    """

    def __init__(self, world: Conditions, draw: Callable[[], float], turns: Sequence[Turns]) -> None:
        self.world, self._draw, self._turns = world, draw, turns
        self.now = 0.0
        self.bytes_sent, self.messages_sent = [0] * world.size, [0] * world.size
        self.awaited: list[dict[int, float]] = [{} for _ in range(world.size)]  # rank -> peer -> seconds
        self._events: list[tuple[float, float, int, Action, Callable[[], bool] | None]] = []
        self._deadlines: list[tuple[float, int, float, weakref.ref[SimulatedCall]]] = []
        self._serial = count()
        self._wishes: list[Action] = []
        self.ranks: list[RankThread[Any]] = []
        self._outstanding: list[dict[Name, SimulatedCall]] = [{} for _ in range(world.size)]  # in flight
        self._calls: list[Counter[Context]] = [Counter() for _ in range(world.size)]
        self._facts: dict[Name, tuple[int, str]] = {}  # of each call: who made it first, and with which
        self._poison: dict[Context | None, CollectiveError] = {}  # None: of the whole world
        self._bereaved: CollectiveError | None = None  # of all communicators but these:
        self.outliving: set[Context] = set()
        self.groups: dict[Context, frozenset[int]] = {}  # communicators that only the end of one of their ranks ends
        self.boards: dict[str, dict[str, str]] = {}
        self.at_exit: list[dict[Any, Action]] = [{} for _ in range(world.size)]  # by board, once a function returns
        self._torn: set[Context] = set()  # of attempts that a rank has left
        self._blocked: dict[int, SimulatedCall | Watch] = {}
        self.ended = frozenset[int]()  # ranks whose function has returned or raised, or that died
        self._inboxes: list[dict[Address, Payload]] = [{} for _ in range(world.size)]
        self._ports = Ports(world.size, self.after, self.seconds_for, self._note_message)
        self.timeline: Timeline | None = None
        self.signals: dict[Context, Any] = {}  # those of all ranks, which look each other up here
        self._thread = threading.current_thread()
        self.over = False

    # Called in a rank's thread.

    def run_rank(self, rank: int, body: Callable[[], T]) -> T:
        """Runs a rank's function, and then what was to be called at its end, as a process does."""
        result = body()
        while self.at_exit[rank]:
            _, close = self.at_exit[rank].popitem()
            with suppress(CollectiveError, TimeoutError):  # the world has failed, or the board is lost
                close()
        return result

    def submit(
        self,
        rank: int,
        schedule: Schedule[Any],
        facts: str,
        timeout: float,
        context: Context,
        places: Sequence[int],
    ) -> SimulatedCall:
        """Starts a call. places: those of its communicator's ranks in the world."""
        if (poison := self.poisoned(context)) is not None:
            schedule.close()
            raise CollectiveError(str(poison)) from poison.__cause__
        call = Call(schedule, rank=rank, size=self.world.size, facts=facts, number=self._calls[rank][context])
        self._calls[rank][context] += 1
        outstanding = SimulatedCall(self, call, context, places)
        self._wishes.append(lambda: self._begin(outstanding, timeout))
        return outstanding

    def wish(self, action: Action) -> None:
        """Has the loop's thread do this as soon as it has the baton."""
        self._wishes.append(action)

    def refuse_to_wait(self, what: str) -> None:
        """Raises RuntimeError in the loop's own thread, which calls `on_signal` and cannot wait for its own events."""
        if self.over:
            self.refuse_if_failed()
        if threading.current_thread() is self._thread:
            raise RuntimeError(
                f"{what} in on_signal, or in a schedule, would wait for itself: do so in the rank's own function; one "
                "schedule reaches another by `yield from`"
            )

    def sleep(self, rank: int, seconds: float) -> None:
        """Lets `seconds` of virtual time pass on this rank."""
        self.refuse_to_wait("to compute, poll or close")
        self._wishes.append(lambda: self.after(seconds, lambda: self._resume(rank)))
        self.ranks[rank].give_back()

    def compute(self, rank: int, seconds: float) -> None:
        """Lets a rank compute for `seconds` of virtual time."""
        began = self.now
        self.sleep(rank, seconds)
        self.note(rank, "compute", began, self.now)

    def note(self, rank: int, name: str, began: float, ended: float) -> None:
        """Notes what a rank does, on the timeline if there is one."""
        if self.timeline is not None and ended > began:
            self.timeline.spans.append(Span(rank, name, began, ended))

    def watch(self, watch: Watch) -> None:
        """Waits until the watched condition holds; returns also where its communicator has failed."""
        self.wish(lambda: self.look_at(watch))
        self.wait(watch, None)

    def look_around(self) -> None:
        """Looks at the conditions of all waiting ranks; called in the loop's thread."""
        for waiting in list(self._blocked.values()):
            if isinstance(waiting, Watch):
                self.look_at(waiting)

    def look_at(self, watch: Watch | None) -> None:
        """Wakes a waiting rank whose condition holds now, or never will; called in the loop's thread."""
        if watch is not None and not watch.done and (self.poisoned(watch.context) or watch.over()):
            watch.done = True
            self._wake(watch)

    def wait(self, outstanding: SimulatedCall | Watch, timeout: float | None) -> None:
        """Waits for the end of a call of this rank."""
        self.refuse_to_wait("waiting")
        if not outstanding.done:
            self._wishes.append(lambda: self._block(outstanding, timeout))
            began = self.now
            self.ranks[outstanding.rank].give_back()
            self.note(outstanding.rank, "wait", began, self.now)
        if not outstanding.done:
            raise TimeoutError(f"not completed within {timeout} virtual seconds: {outstanding.waits()}")

    # Called in the loop's thread.

    def _block(self, outstanding: SimulatedCall | Watch, timeout: float | None) -> None:
        self._blocked[outstanding.rank] = outstanding
        if outstanding.done:
            self._wake(outstanding)
        elif timeout is not None:
            live = lambda: self._blocked.get(outstanding.rank) is outstanding  # noqa: E731
            self.after(timeout, lambda: self._wake(outstanding), live)

    def run(self, bodies: list[Callable[[], T]]) -> list[T]:
        """Runs one body per rank to its end; returns their results."""
        lives = [partial(self.run_rank, rank, body) for rank, body in enumerate(bodies)]
        self.ranks = [RankThread(*each) for each in zip(lives, self._turns, strict=True)]
        for rank in range(len(bodies)):
            self.after(0.0, partial(self._resume, rank))
        for rank, seconds in self.world.deaths:
            die = partial(self._die, rank, f"rank {rank} died after {seconds:g} virtual seconds")
            self.after(seconds, die, live=partial(self.lives, rank))
        try:
            self._drain()
            while len(self.ended) < len(bodies):
                self.fail("deadlock: " + "; ".join(self._stuck()), None)
                self._drain()
            self._check_end()
        finally:
            for thread in self.ranks:
                thread.kill()
            self._poison.setdefault(None, CollectiveError("the run of this simulated world is over"))
            self.over = True
        return [thread.result for thread in self.ranks]

    def after(self, seconds: float, action: Action, live: Callable[[], bool] | None = None) -> None:
        """Enters an event; if it is not `live` any more when its time comes, it never happened."""
        heapq.heappush(self._events, (self.now + seconds, self._draw(), next(self._serial), action, live))

    def _drain(self) -> None:
        while self._events:
            event = time, _, _, action, live = heapq.heappop(self._events)
            if live is not None and not live():
                continue
            self._expire(before=time)
            if self._events and self._events[0] < event:  # who was told that its call timed out goes on before that
                heapq.heappush(self._events, event)
                continue
            self.now = max(self.now, time)
            action()
            self._carry_out()  # a schedule may send signals too

    def _expire(self, before: float) -> None:
        """Fails the calls whose deadline has come; where nothing else would happen, a deadlock is reported instead."""
        while self._deadlines and self._deadlines[0][0] < before:
            time, _, timeout, ref = heapq.heappop(self._deadlines)
            outstanding = ref()
            if outstanding is not None and not outstanding.done:
                self.now = time
                self.fail(f"timed out after {timeout} virtual seconds: {outstanding.waits()}", outstanding.context)

    def guarded(self, context: Context, rank: int, deliver: Action) -> None:
        """Delivers a signal to a rank; an error of its listener fails the communicator."""
        try:
            deliver()
        except Exception as error:
            self.fail(errors.reason(rank, "its signals", error), context, error)
        self._carry_out()

    def seconds_for(self, source: int, target: int, nbytes: int) -> tuple[float, float]:
        """Seconds until a message's sender and its receiver are free; alpha partly drawn, where there is jitter."""
        path = self.world.paths(source, target)
        alpha = path.alpha + self.world.jitter * self._draw() if self.world.jitter else path.alpha
        return alpha + path.up * nbytes, alpha + path.down * nbytes

    def let_through(self, rank: int, peer: int, arrive: Action) -> None:
        """Has a message arrive now, or once the link is back."""
        back = self.world.dark_until(rank, peer, self.now)
        self.after(back - self.now, arrive) if back > self.now else arrive()

    def tear(self, outstanding: SimulatedCall, reason: str = "it was cancelled") -> None:
        """Ends a call on its rank alone."""
        self._torn.add(outstanding.context)
        if not outstanding.done:
            self._end(outstanding, CollectiveError(reason))

    def lives(self, rank: int) -> bool:
        """Whether a rank's function goes on."""
        return rank not in self.ended

    def _die(self, rank: int, reason: str) -> None:
        """Ends a rank, and all calls but those that outlive ranks."""
        self.ranks[rank].dead, self.ended = True, self.ended | {rank}
        self._blocked.pop(rank, None)
        for outstanding in list(self._outstanding[rank].values()):
            outstanding.callbacks.clear()
            self.tear(outstanding, reason)
        self._bereaved = self._bereaved or self._poison.get(None) or CollectiveError(reason)
        self._end_all(self._bereaved, lambda context: context not in self.outliving and context not in self.groups)
        self._part(rank)
        self.look_around()

    def _part(self, rank: int) -> None:
        """Ends the groups of a rank that has ended, but for calls that it has been in: their messages are under way."""
        for context in [context for context, members in self.groups.items() if rank in members]:
            waiting = (calls.get((context, number)) for calls in self._outstanding for _, number in list(calls))
            made = self._calls[rank][context]
            if self.ranks[rank].dead or any(one is not None and one.call.number >= made for one in waiting):
                self.fail(errors.lost(rank), context)

    def _resume(self, rank: int) -> None:
        thread = self.ranks[rank]
        if thread.dead:
            return
        self._blocked.pop(rank, None)
        thread.resume()
        if thread.over:
            self.ended |= {rank}
        self._carry_out()
        if thread.over:
            self._part(rank)
            self.look_around()
        if thread.error is not None:
            self.fail(errors.reason(rank, "its own code", thread.error), None, thread.error)

    def _carry_out(self) -> None:
        wishes, self._wishes = self._wishes, []
        for wish in wishes:
            wish()

    def _begin(self, outstanding: SimulatedCall, timeout: float) -> None:
        call = outstanding.call
        if (poison := self.poisoned(outstanding.context)) is not None:
            self._end(outstanding, poison)
            return
        self._outstanding[call.rank][outstanding.name] = outstanding
        heapq.heappush(self._deadlines, (self.now + timeout, next(self._serial), timeout, weakref.ref(outstanding)))
        other, facts = self._facts.setdefault(outstanding.name, (call.rank, call.facts))
        if left := self._left(outstanding):
            self.fail(errors.lost(left[0]), outstanding.context)
        elif call.facts != facts:
            self.fail(errors.mismatch(call.number, call.rank, call.facts, other, facts), outstanding.context)
        else:
            self._advance(outstanding, {})

    def _left(self, outstanding: SimulatedCall) -> list[int]:
        """Ranks of its group that have ended before they came to this call."""
        number, context = outstanding.call.number, outstanding.context
        ended = self.groups.get(context, frozenset()) & self.ended
        return sorted(rank for rank in ended if self._calls[rank][context] <= number)

    def _advance(self, outstanding: SimulatedCall, received: Received) -> None:
        """Steps the schedule; then it waits for messages or for time, or has ended."""
        call = outstanding.call
        try:
            action = call.step(received)
        except Exception as error:
            self.fail(errors.reason(call.rank, call.facts, error), outstanding.context, error)
            return
        if action is None:
            self._end(outstanding, None)
        elif isinstance(action, Elapse):
            seconds = action.seconds * self.world.slowdown[call.rank]
            self.note(call.rank, "merge", self.now, self.now + seconds)
            self.after(seconds, lambda: self._advance(outstanding, {}), live=lambda: not outstanding.done)
        elif isinstance(action, Round):
            self._post(outstanding, action)

    def _post(self, outstanding: SimulatedCall, action: Round) -> None:
        call, outstanding.received, outstanding.unsent = outstanding.call, {}, len(action.sends)
        outstanding.posted, outstanding.met = self.now, (*action.sends, *action.recvs)
        outstanding.lacks = {peer: (call.tag(peer, call.heard), capacity) for peer, capacity in action.recvs.items()}
        for target, payload in action.sends.items():
            fault = self.world.faults.get((call.rank, self.messages_sent[call.rank]))
            if isinstance(fault, Dies):
                self._die(call.rank, f"rank {call.rank} died in {call.facts}")
                return
            call.stamp(payload)
            outstanding.bytes_sent += payload.wire_nbytes
            self.bytes_sent[call.rank] += payload.wire_nbytes
            self.messages_sent[call.rank] += 1
            self._ports.post(self._message(outstanding, target, payload, fault))
        if not action.sends:
            self.after(0.0, lambda: self._try_round(outstanding))  # an event, so that many such rounds do not recurse

    def _message(self, outstanding: SimulatedCall, target: int, payload: Payload, fault: Corrupts | None) -> Message:
        call = outstanding.call
        address = (call.rank, outstanding.name, call.tag(target, call.sent))

        def delivered() -> None:
            arrived = payload.clone()  # only now: a schedule that changes what it yielded is found out
            if fault is not None:
                arrived.memory[fault.bit // 8 % arrived.wire_nbytes] ^= 1 << fault.bit % 8
            self._inboxes[target][address] = arrived
            outstanding.unsent -= 1
            self._try_round(outstanding)
            if outstanding.name in self._outstanding[target]:
                self._try_round(self._outstanding[target][outstanding.name])

        return Message(call.rank, target, payload, lambda: self.let_through(call.rank, target, delivered))

    def _note_message(self, message: Message, seconds: float) -> None:
        if self.timeline is not None:
            nbytes, ended = message.payload.wire_nbytes, self.now + seconds
            self.timeline.sent.append(Sent(message.source, message.target, nbytes, self.now, ended))

    def _try_round(self, outstanding: SimulatedCall) -> None:
        """Takes what has arrived; steps on when the round lacks nothing more."""
        if outstanding.done or outstanding.unsent < 0:
            return
        inbox, awaited = self._inboxes[outstanding.call.rank], self.awaited[outstanding.call.rank]
        for source, (tag, capacity) in list(outstanding.lacks.items()):
            if (payload := inbox.pop((source, outstanding.name, tag), None)) is not None:
                del outstanding.lacks[source]
                awaited[source] = awaited.get(source, 0.0) + self.now - outstanding.posted
                outstanding.received[source] = payload
                try:
                    outstanding.call.accept(source, payload, capacity)
                except CollectiveError as error:
                    self.fail(str(error), outstanding.context)
        if not outstanding.done and not outstanding.lacks and not outstanding.unsent:
            outstanding.unsent = -1
            self._advance(outstanding, outstanding.received)

    def poisoned(self, context: Context) -> CollectiveError | None:
        """Error of a communicator that has failed; None while it has not."""
        bereaved = None if context in self.outliving or context in self.groups else self._bereaved
        return self._poison.get(context) or bereaved or self._poison.get(None)

    def refuse_if_failed(self) -> None:
        """Raises the error of a world in which a rank's own code has raised."""
        if (poison := self._poison.get(None)) is not None:
            raise CollectiveError(str(poison)) from poison.__cause__

    def fail(self, reason: str, context: Context | None, cause: BaseException | None = None) -> None:
        """Fails a communicator (None: all of them): its calls in flight, and later ones, end with its first reason."""
        if None in self._poison or context in self._poison:
            return
        poison = self._poison[context] = CollectiveError(reason)
        poison.__cause__ = cause
        self._end_all(poison, lambda one: context in (None, one))
        self.look_around()

    def _end_all(self, error: CollectiveError, of: Callable[[Context], bool]) -> None:
        """Ends the calls in flight of these communicators."""
        for calls in self._outstanding:
            for outstanding in list(calls.values()):
                if of(outstanding.context):
                    self._end(outstanding, error)

    def _end(self, outstanding: SimulatedCall, error: CollectiveError | None) -> None:
        outstanding.done, outstanding.error, outstanding.ended = True, error, self.now
        outstanding.value = outstanding.call.value
        self._outstanding[outstanding.call.rank].pop(outstanding.name, None)
        if error is not None:
            outstanding.call.close()
        callbacks, outstanding.callbacks = outstanding.callbacks, []
        for callback in callbacks:
            callback()
        self._wake(outstanding)

    def _wake(self, outstanding: SimulatedCall | Watch) -> None:
        """Has the rank that waits for it, if it does, go on by an event."""
        if self._blocked.get(outstanding.rank) is outstanding:
            del self._blocked[outstanding.rank]
            self.after(0.0, partial(self._resume, outstanding.rank))

    def _stuck(self) -> list[str]:
        waiting = [self._blocked[rank].waits() for rank in sorted(self._blocked)]
        gone = [str(rank) for rank, thread in enumerate(self.ranks) if thread.over]
        dead = [str(rank) for rank, thread in enumerate(self.ranks) if thread.dead]
        waiting += [f"already returned: rank {', '.join(gone)}"] if gone else []
        return waiting + ([f"dead: rank {', '.join(dead)}"] if dead else [])

    def _check_end(self) -> None:
        """Raises what went wrong on a rank, or says what a schedule has left behind."""
        raised = [thread.error for thread in self.ranks if thread.error is not None]
        raised.sort(key=lambda error: isinstance(error, CollectiveError))  # a cause rather than its consequences
        if raised:
            raise raised[0]
        if None in self._poison or self._bereaved is not None:
            return  # every rank has caught it
        self._check_left_behind()

    def _check_left_behind(self) -> None:
        def given_up(context: Context) -> bool:
            """Whether somebody has left this group, or one that it belongs to, and reads nothing there."""
            groups = any(context[:length] in self.groups for length in range(len(context) + 1))
            return groups or context in self._poison or context in self._torn

        for outstanding in (one for calls in self._outstanding for one in calls.values()):
            if given_up(outstanding.context):
                continue
            raise CollectiveError(f"started, but never completed: {outstanding.waits()}")
        unread = ((rank, *address) for rank, inbox in enumerate(self._inboxes) for address in inbox)
        for rank, source, name, _ in unread:
            if not given_up(name[0]):
                raise CollectiveError(
                    f"rank {source} sent a message to rank {rank} in call {name[1]}, {self._facts[name][1]}, "
                    "which was never received"
                )


class _SimulatedFuture(torch.futures.Future[T]):
    """Completes when somebody waits for it: in a simulated world nothing happens in between."""

    def __init__(self, compute: Callable[[], T]) -> None:
        super().__init__()
        self._compute = compute

    def wait(self) -> T:
        if not self.done():
            self.set_result(self._compute())
        return super().wait()

    def then(self, callback: Callable[..., Any]) -> torch.futures.Future[Any]:
        def after() -> Any:
            self.wait()
            return callback(self)

        return _SimulatedFuture(after)
