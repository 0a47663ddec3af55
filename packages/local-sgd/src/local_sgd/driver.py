"""Exchanges of means, to which every rank applies the rule, in mid-training and at its end."""

import copy
import math
import reprlib
import weakref
import zlib
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from communicators import Communicator, allgather, run, schedules
from replicas import Buffers, Wrapping, average_tensors, check_like, refuse_unlike
from torch import Tensor

from local_sgd.at_rest import AtRest
from local_sgd.averaging import Arrived, Averaging, refuse_nonfinite
from local_sgd.compression import CompressedAveraging, ResidualSum, SparseSum
from local_sgd.fragments import Fragment, Fragments, fragments_of
from local_sgd.inner_state import average_inner_state, averaged_entries
from local_sgd.parts import by_name, digest, parts_of, refuse_other_shapes
from local_sgd.rule import Part, Rule
from local_sgd.settings import Every, Settings, whole
from local_sgd.two_momenta import warn_of_two_momenta

BUCKET_BYTES = 25 << 20
"""As DDP's. More than 32 MiB glibc takes anew from the kernel each time, in pages that cost more than sums."""
NEEDS = ("algorithm", "block", "kept", "rates", "parameters", "drained")
COUNTERS = ("steps", "done", "length", "boundaries", "weight")


class Block:
    """Position of a rank in its block of τ steps; the first block has τ steps like every other.

    every: τ; a new value counts from the next block on. steps: in all blocks; done: in this one, of `length` (1 before
    the first step where τ is a function); weight: the sum of the weights of its steps; boundaries: exchanges so far.
    rates: learning rates of its last step, by group, noted for rules that need them; [] before it.
    """

    def __init__(self, every: Every) -> None:
        if not callable(every):
            whole("sync_every", every, " of steps, or a function from the number of steps so far to one")
        self.every, self.length = every, 1 if callable(every) else every
        self.steps = self.done = self.boundaries = 0
        self.weight = 0.0
        self.rates: list[float] = []

    def count(self, weight: float) -> bool:
        """Counts one step; returns whether it was the block's last."""
        if self.done == 0:
            every, name = self.every, f"sync_every({self.steps})"
            self.length = whole(name, every(self.steps), " of steps") if callable(every) else every
        self.steps, self.done, self.weight = self.steps + 1, self.done + 1, self.weight + weight
        return self.done >= self.length

    def end(self) -> None:
        """Ends the block; the next step begins another."""
        self.done, self.weight, self.rates = 0, 0.0, []

    def state_dict(self) -> dict[str, Any]:
        """Counters, as plain numbers."""
        return {name: getattr(self, name) for name in COUNTERS}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the counters."""
        vars(self).update({name: state[name] for name in COUNTERS})


def rates_of(groups: list[dict[str, Any]]) -> list[float]:
    """Learning rate of each parameter group, NaN where it has none."""
    return [float(group.get("lr", math.nan)) for group in groups]


class Driver:
    """Parameters as parts with the rule's state, and the points at which ranks exchange them; of one optimizer.

    The whole model is exchanged at the end of a block; the mean of a rule that overlaps travels during the next one.
    With a delay it is one of F fragments every τ/F steps. The k-th of a block is launched after its step ⌊k·τ/F⌋, and
    its mean applied `delay` steps later, or before its next launch where that comes earlier. In an elastic group it is
    applied before the next launch of any, so that launches and means come in one order on all ranks, whatever their
    blocks.

    parts: parameters that are averaged, as flat vectors. block: position of this rank between two boundaries; nearest:
    between two exchanges, of which a boundary may have several. fragments: exchanges, among all ranks. sums: what they
    are compressed by; None: nothing is. comms: what they go over. drained: all ranks hold the model. loaded: whether a
    state was loaded since the last boundary. agreed: facts that ranks compared at the beginning. needs: keys of
    `state_dict` that must be there. at_rest: watch over the parameters, with `verify`.
    """

    two_levels = False
    meets = False
    """Whether ranks come to its exchanges each after as many steps as it likes."""
    inelastic: ClassVar[str] = ""
    """Reason why its ranks cannot come and go."""

    def __init__(self, sums: ResidualSum | None = None, fragments: Fragments = 1, delay: int | None = None) -> None:
        self.sums, self.delay = sums, delay
        self.by_fragment, self._asked = delay is not None, fragments
        self._turn = self._launched = 0  # the next fragment; how many were launched in this block
        self.before: list[Tensor] = []  # last means, at this rank's end
        self._missed = 0  # means since this rank has had steps
        self._opens = False  # whether ranks may come and go after this step
        self.at_rest: AtRest | None = None

    def facts(self) -> dict[str, Any]:
        """Settings that ranks must share, by name."""
        delay = {"delay": self.delay} if self.by_fragment else {}
        return delay if self.sums is None else {**delay, "compress": self.sums}

    def begin(self, owner: Wrapping, rule: Rule, block: Block, buffers: Buffers, settings: Settings) -> None:
        """Starts the rule's state from x, the model, which all ranks hold; nothing is launched yet."""
        self.owner: Wrapping = weakref.proxy(owner)  # which goes, with its vectors, as soon as nobody has it
        self.rule, self.comm, self.what, self.comms = rule, owner.comm, owner.what, [owner.comm]
        self.block, self.nearest, self.buffers = block, block, buffers
        self._weighted = settings.get("weighted", False)
        self._sum: dict[str, Any] = {"native": settings.get("native", False), "shares": settings.get("shares")}
        device = None if settings.get("anchor_device") is None else torch.device(str(settings["anchor_device"]))
        selects = isinstance(self.sums, SparseSum)  # among all elements of a vector
        most = settings.get("bucket_bytes") or (None if selects else BUCKET_BYTES)
        self._pieces = [
            (list(piece), parts_of(owner.param_groups, piece, most, device))
            for piece in fragments_of(owner.trained, self._asked)
        ]
        self.parts = [part for _, parts in self._pieces for part in parts]
        if self.sums is not None:
            self.sums.begin(self.parts, self.comm, self.what)
        self._shares_buffers = settings.get("buffers", "keep") != "keep"
        self._policy = settings.get("inner_state", "keep")
        self._averaged = averaged_entries(owner.optimizer) if self._policy == "average" else []
        self._verify: int | None = settings.get("verify")
        self._begun: int | None = None  # hash of the parameters that ranks began with, until the next boundary
        self.loaded = False
        for part in self.parts:
            x = part.gather()
            part.kept = {name: x.clone() for name in rule.anchors}
            part.kept |= {name: torch.zeros_like(x) for name in rule.momenta}
        if self._verify:
            self.at_rest = AtRest(self.resting(), self.what)
        self.connect()
        self.all_hold([part.gather() for part in self.parts])

    def connect(self) -> None:
        """Makes the exchanges, among all ranks, each with a rule begun for it."""
        self.fragments, rules = list[Fragment](), [self.rule, *(copy.copy(self.rule) for _ in self._pieces[1:])]
        for (names, parts), rule in zip(self._pieces, rules, strict=True):
            averaging = Averaging(self.comm, self.what, **self._sum)
            if self.sums is not None:
                averaging = CompressedAveraging(self.comm, self.what, parts, rule.anchors[0], self.sums)
            rule.begin(parts, names)
            averaging.alike = rule.alike
            self.fragments.append(Fragment(parts, averaging, rule, self.by_fragment, self.comm.first_size))
        named = zlib.crc32(repr([fragment.names for fragment in self.fragments]).encode())
        self.agreed = f", {len(self.fragments)} fragments {named:08x}" * self.by_fragment + self.rule.alike()
        if self.agreed and not self.owner.enters:  # newcomers compare it later
            comm, facts = self.comm, f"{self.what}{self.agreed}"
            comm.atomic(lambda: run(schedules.barrier(comm.rank, comm.size), comm, facts=facts))
        whole_model = [*self.rule.state_dict(), *["arrived"] * self.rule.overlaps]
        self.needs = [*NEEDS, *(["turn", "launched", "fragments"] if self.by_fragment else whole_model)]

    def enter(self) -> None:
        """Begins what follows a newcomer's state."""

    def regrouped(self) -> None:
        """Follows a change of an elastic group."""

    def part(self) -> None:
        """Leaves what that has opened with other ranks."""

    def resting(self) -> dict[str, Tensor]:
        """Tensors that only steps and `average()` change."""
        return dict(self.owner.trained)

    def count(self, weight: float) -> None:
        """Counts a step, applies the means that are due, and exchanges what comes next."""
        self.block.count(weight)
        self.before, self._missed = [], 0
        for fragment in self.fragments:
            fragment.done, fragment.weight = fragment.done + 1, fragment.weight + weight
        for fragment in self._under_way():
            assert fragment.due is not None
            fragment.due -= 1
            if fragment.due <= 0:
                self._take(fragment, fragment.averaging.arrived())
        while self._launched < self._launches_by_now():
            self._exchange(finished=False)
        if self._launched == len(self.fragments):
            self._end_block()
        if self._opens:  # only now, because a rank that leaves goes at once
            self._opens = False
            self.owner.let_in()

    def end(self, *, most: int | None) -> None:
        """Ends this rank's steps with the model in place; most: boundaries to it at most, on all ranks at once."""
        left = math.inf if most is None else most + self.rule.overlaps
        if not self.rule.overlaps:
            for fragment in self._under_way():
                self._take(fragment, fragment.averaging.arrived())
                if self._opens and most is None:
                    self.owner.let_in(at_once=True)
        ended, arrived = 0, Arrived([], 0.0, 0)
        while ended < len(self.fragments):
            arrived = self._exchange(finished=True)
            if self.rule.mean_is_model:
                self.before = arrived.means or self.before
            self._end_block()
            ended, left = 0 if arrived.unfinished else ended + 1, left - 1
            if arrived.unfinished and left < 1:
                self.refuse_undrained(arrived.unfinished)
            if arrived.unfinished and most is None:  # as ranks do that go on
                self.owner.let_in(at_once=True)
        models = self._final(arrived.means) if self.rule.mean_is_model else self.anchors()
        if self.at_rest is not None:
            self.at_rest.refuse(self.comm)
            self.compare(by_name(self.parts, models), "at the end")
        self.put(self.parts, models)
        self.all_hold(models)
        self.before = []
        self.buffers.at_end(counts=self._missed <= len(self.fragments) + self.rule.overlaps)  # else they are too old

    def models(self, comm: Communicator) -> list[Tensor]:
        """Current model: mean over ranks, or anchors, as a mean under way will leave them; none is applied.

        Without steps in this block no rank has a weight, and all count alike.
        """
        drafts, xs = self.parts, [part.gather() for part in self.parts]
        same = self.rule.mean_is_model and not self._weighted  # what is under way leaves a plain mean as it is
        if self.rule.overlaps and not same and (arrived := self.fragments[0].averaging.arrived()).means:
            drafts = [part.draft() for part in self.parts]
            xs = _moved(self.rule, drafts, xs, arrived)
        if not self.rule.mean_is_model:
            return self.anchors(drafts)
        averaging = Averaging(comm, self.what, **self._sum, call="averaged_model")
        weight = self.own_weight(self.fragments[0]) if self._weighted else 1.0
        return averaging.now(xs, weight, finished=False).means or averaging.now(xs, 1.0, finished=False).means

    def give_up(self, error: BaseException) -> None:
        """Tells other ranks of an error, where they would not see it in their next exchange."""
        del error

    def stats(self) -> dict[str, float]:
        """Seconds of this rank's exchanges and, where there are residuals, their norm, by the names of `Stats`."""
        waited = sum(fragment.averaging.waited for fragment in self.fragments)
        exchanging = sum(fragment.averaging.exchanging for fragment in self.fragments)
        hidden = max(0.0, exchanging - waited)
        seconds = {"seconds_exchanging": exchanging, "seconds_waited": waited, "seconds_hidden": hidden}
        left = None if self.sums is None else self.sums.residual_norm
        return seconds if left is None else {**seconds, "residual_norm": left}

    def state_dict(self, *, waits: bool = True) -> dict[str, Any]:
        """This rank's own part of a state, by parameter, so that it outlives another cut into vectors.

        waits: for what is under way, which is part of it. False, for newcomers: it says only that it is under way.
        """
        exchanges = [fragment.state_dict(waits=waits) for fragment in self.fragments]  # waiting changes residuals
        own = exchanges[0]
        if self.by_fragment:
            fragments = {str(turn): exchange for turn, exchange in enumerate(exchanges)}
            own = {"turn": self._turn, "launched": self._launched, "fragments": fragments}
        rounded = [part for part in self.parts if part.remainder is not None]
        rates = {part.group: part.last_rate for part in reversed(self.parts)}
        residuals = {} if self.sums is None else {"kind": self.sums.kind, "parts": self.sums.state_dict()}
        return {
            "algorithm": self.what,
            "block": self.block.state_dict(),
            "kept": {name: by_name(self.parts, [part[name] for part in self.parts]) for name in self.rule.kept},
            "remainders": by_name(rounded, [part.remainder for part in rounded if part.remainder is not None]),
            "rates": [rates.get(group, 0.0) for group in range(len(self.owner.param_groups))],
            "parameters": digest(self.owner.trained),
            "drained": self.drained,
            **({"stepped": self.block.rates} if self.block.rates and self.block.done else {}),
            **({"residuals": residuals} if residuals else {}),
            **own,
        }

    def check(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError for a state that does not fit; changes nothing."""
        if state["algorithm"] != self.what:
            raise ValueError(
                f"the state is of {state['algorithm']}, but this is {self.what}: to go on with another algorithm start "
                "from a plain checkpoint of the model, made inside averaged_model(), or after drain()"
            )
        if lacking := [key for key in self.needs if key not in state]:
            raise ValueError(f"the state lacks {lacking}: it was cut, or is of other settings of {self.what}")
        groups, plain = self.owner.param_groups, {"turn": 0, "launched": 0, "drained": False, "parameters": -1}
        rate = 0.0 if all("lr" in group for group in groups) else math.nan
        check_like({"turn": 0, "launched": 0, **state}, plain, "")
        check_like({"stepped": [], **state}, {"rates": [rate], "stepped": [rate], "block": self.block.state_dict()}, "")
        rounded = [part for part in self.parts if part.remainder is not None]
        refuse_other_shapes("remainders", state.get("remainders", {}), rounded)
        for name in self.rule.kept:
            refuse_other_shapes(name, state["kept"].get(name, {}), self.parts)
        for rates in (state["rates"], state.get("stepped") or groups):
            if len(rates) != len(groups):
                raise ValueError(f"the state has {len(rates)} parameter groups, the optimizer {len(groups)}")
        if ("near" in state) != self.two_levels:
            raise ValueError(f"the state is of {1 + ('near' in state)} levels, sync_every of {1 + self.two_levels}")
        theirs, kind = state.get("residuals", {}).get("kind"), None if self.sums is None else self.sums.kind
        if theirs != kind:
            raise ValueError(f"the state is of compression {theirs}, but compress={self.sums!r} is {kind}")
        if self.sums is not None and self._is_own(state):
            self.sums.check(state["residuals"]["parts"])
        if "rounds" in state and "rounds" not in self.needs:
            raise ValueError("the state is of outer steps by rounds, and this optimizer is without")
        if self.by_fragment and len(state["fragments"]) != len(self.fragments):
            raise ValueError(f"the state is of {len(state['fragments'])} fragments, this is of {len(self.fragments)}")
        for fragment, exchange in self._with_states(state):
            fragment.check(exchange)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state that `check` accepted; what is written in place last, where nothing can fail any more."""
        self._load(state)
        for part in self.parts:
            for name in self.rule.kept:
                part[name].copy_(part.flat_of(state["kept"][name]))
        self._go_on(state)

    def _go_on(self, state: Mapping[str, Any]) -> None:
        """Goes on with others from a state that was loaded."""

    def _load(self, state: Mapping[str, Any]) -> None:
        self.block.load_state_dict(state["block"])
        self.block.rates = list(state.get("stepped", []))
        for part in self.parts:
            if part.remainder is not None:
                part.remainder = part.flat_of(state["remainders"])
            part.last_rate = state["rates"][part.group]
        if self.sums is not None and self._is_own(state):
            self.sums.load_state_dict(state["residuals"]["parts"])
        for fragment, exchange in self._with_states(state):
            fragment.load_state_dict(exchange)
        self._turn, self._launched = state.get("turn", 0), state.get("launched", 0)
        self.drained, self.loaded, self._left = state["drained"], True, state["parameters"]
        if self.at_rest is not None:
            self.at_rest.forget()

    def _with_states(self, state: Mapping[str, Any]) -> list[tuple[Fragment, Mapping[str, Any]]]:
        """Fragments, each with its state; that of the whole model is not apart."""
        states = state["fragments"] if self.by_fragment else {"0": state}
        return [(fragment, states[str(turn)]) for turn, fragment in enumerate(self.fragments)]

    def _is_own(self, state: Mapping[str, Any]) -> bool:
        """Whether the state was saved by this rank, among the same number of ranks."""
        return bool((state.get("rank"), state.get("world_size")) == (self.comm.rank, self.comm.size))

    def join(self, state: Mapping[str, Any]) -> None:
        """Goes on from the state of another rank of an elastic group, with no steps of its own yet."""
        self.load_state_dict(state)
        self.loaded = False
        for fragment, ranks in zip(self.fragments, state["ranks"], strict=True):
            fragment.done, fragment.weight, fragment.ranks, fragment.averaging.ranks = 0, 0.0, ranks, ranks
            fragment.rule.fit(ranks)
        if state["before"]:
            self.before = [part.flat_of(state["before"]) for part in self.parts]

    def compare(self, held: Mapping[str, Tensor], when: str) -> None:
        """Raises CollectiveError on every rank where they hold unlike tensors."""
        self.comm.atomic(lambda: refuse_unlike(held, self.comm, when=f"{when} of {self.what}"))

    def all_hold(self, models: list[Tensor]) -> None:
        """Notes that all ranks hold these models; where the rule overlaps, an exchange without means is under way."""
        self._anchor(models)
        self.owner.end_steps()
        self.drained, rounded = True, any(part.remainder is not None for part in self.parts)
        self._left = digest(self.owner.trained) if rounded else None  # hash of the parameters that remainders are of
        if self.rule.overlaps:
            for fragment in self.fragments:
                fragment.averaging.store(Arrived([], 0.0, self.comm.size))
                fragment.due = math.inf

    def depart(self) -> None:
        """Leaves the drained state before a step: anchors take the parameters that ranks hold now, loaded or not."""
        if self.drained:
            held = None if self._verify == 0 and self._left is None else digest(self.owner.trained)
            self.drained, self._begun = False, None if self._verify == 0 else held
            for part in self.parts if self._left not in (None, held) else ():  # rounded off of other parameters
                part.remainder = None if part.remainder is None else torch.zeros_like(part.remainder)
            self._anchor(part.gather() for part in self.parts)

    def _anchor(self, models: Iterable[Tensor]) -> None:
        for part, model in zip(self.parts, models, strict=True):
            for name in self.rule.anchors:
                part[name].copy_(model)

    def put(self, parts: Iterable[Part], xs: Iterable[Tensor]) -> None:
        """Puts vectors, one for each part, into the parameters."""
        for part, x in zip(parts, xs, strict=True):
            if getattr(x, "shape", None) != (part.bucket.numel,):
                given = reprlib.repr(getattr(x, "shape", x))
                raise TypeError(
                    f"a boundary of {self.what} returned {given}, expected x after it, of {part.bucket.numel} elements"
                )
            part.put(x)

    def next_boundary(self) -> str:
        """Counts a boundary; returns the facts of its exchange by which ranks are seen to come to it alike."""
        self.owner.check_exchange()
        since = f", after states of boundary {self.block.boundaries} were loaded on all ranks," if self.loaded else ""
        if self._begun is not None:
            alike = "load weights on all ranks alike, and give models that share parameters one optimizer"
            since += f", begun with parameters of hash {self._begun % 2**64:016x} ({alike}),"
        self.loaded, self._begun = False, None
        if self.block.boundaries == 0 and self._policy != "reset":
            warn_of_two_momenta(self.what, self.rule.gain(), self.owner.param_groups, self.block.length)
        self.block.boundaries += 1
        return since

    def own_weight(self, block: Block | Fragment) -> float:
        """Weight of this rank in a mean, by its steps since the last one."""
        return block.weight if self._weighted else float(block.done > 0)

    def refuse_undrained(self, unfinished: int) -> None:
        """Raises RuntimeError where ranks go on while this one drains."""
        raise RuntimeError(
            f"drain() is for all ranks at the same point, but {unfinished} of {self.comm.size} went on with "
            "average(): a rank that has no more steps calls finish()"
        )

    def anchors(self, parts: Iterable[Part] | None = None) -> list[Tensor]:
        """First anchor of each part, or x where all ranks hold the model."""
        return [part.gather() if self.drained else part[self.rule.anchors[0]] for part in parts or self.parts]

    def _under_way(self) -> list[Fragment]:
        """Fragments under way, in the order of their launches."""
        ordered = self.fragments[self._turn :] + self.fragments[: self._turn]
        return [fragment for fragment in ordered if fragment.due is not None]

    def _launches_by_now(self) -> int:
        count = len(self.fragments)  # the most k of which k·τ/F < the step that comes
        return min(count, ((self.block.done + 1) * count - 1) // self.block.length)

    def _due_watch(self) -> AtRest | None:
        """Watch over the parameters, where a comparison is due: all fragments of a boundary have it alike."""
        times = (self.block.boundaries - 1) // len(self.fragments) + 1
        return None if not self._verify or times % self._verify else self.at_rest

    def _compare_shared(self, fragment: Fragment) -> None:
        """Compares the state of a fragment that ranks share, before this boundary changes it."""
        if shared := shared_state(fragment.parts, fragment.rule):
            self.compare(shared, f"at boundary {self.block.boundaries}")

    def _end_block(self) -> None:
        self.block.end()
        self._launched = 0

    def _exchange(self, *, finished: bool) -> Arrived:
        """Exchanges the next fragment, at once or under way from now on; returns the means that were applied last.

        What is under way is awaited first, and a launch comes last: in an elastic group what was launched before a
        change is launched again when it is awaited, which is the next call of those who had not launched it either.
        """
        fragment, arrived = self.fragments[self._turn], Arrived([], 0.0, self.comm.size)
        since = self.next_boundary()
        under_way = [earlier for earlier in self._under_way() if earlier is fragment or self.comm.elastic]
        for earlier in under_way:
            earlier.averaging.wait()
        watch = self._due_watch()
        if watch is not None:
            watch.refuse(self.comm)
        if watch is not None and not self.by_fragment:
            self._compare_shared(fragment)
        xs: list[Tensor] = []
        for earlier in under_way:
            arrived = earlier.averaging.arrived()
            xs = self._take(earlier, arrived)
        if watch is not None and self.by_fragment:  # only now have all ranks taken its last mean
            self._compare_shared(fragment)
        if not self.rule.overlaps:
            xs = [part.gather() for part in fragment.parts]
        weight, counts = self.own_weight(fragment), fragment.done > 0  # one that has finished has had no steps
        travels, last = bool(self.rule.overlaps or self.delay), self._turn == len(self.fragments) - 1
        if last and travels:
            self._share(counts)
        if at_once := not self.rule.overlaps and (finished or not self.delay):
            arrived = fragment.averaging.now(xs, weight, finished=finished, since=since)
            self._take(fragment, arrived, xs)
        if watch is not None and not fragment.rule.shared_names and arrived.means:
            means = by_name(fragment.parts, arrived.means)
            self.compare(means, f"in the mean at boundary {self.block.boundaries}")
        if not at_once and arrived.unfinished:
            fragment.averaging.launch(xs, weight, finished=finished, since=since)
            fragment.due = math.inf if self.delay is None else self.delay
        self._missed += int(bool(arrived.means) and not counts)
        fragment.done, fragment.weight = 0, 0.0
        self._launched, self._turn = self._launched + 1, (self._turn + 1) % len(self.fragments)
        if last and not travels:
            self._share(counts)
        return arrived

    def _share(self, counts: bool) -> None:
        """Shares inner states and buffers; counts: whether this rank has had steps since the last time."""
        inner = self.owner.optimizer
        if self._policy == "reset":
            inner.state.clear()
        elif self._policy == "average":
            facts = f"inner state of {self.what}"
            average_inner_state(inner, self._averaged, self.comm, facts=facts, counts=counts)
        if self._shares_buffers:
            self.buffers.at_boundary(counts=counts)

    def _take(self, fragment: Fragment, arrived: Arrived, xs: list[Tensor] | None = None) -> list[Tensor]:
        """Applies the rule to a fragment, and returns x after it; xs: x before it, where that is known."""
        refuse_nonfinite(fragment.parts, arrived.means, self.comm, self.what)
        fragment.due = None
        self._set_rates(fragment)
        if fragment.ranks != fragment.averaging.ranks:  # of the means, alike on all, whoever has died since then
            fragment.ranks = fragment.averaging.ranks
            fragment.rule.fit(fragment.ranks)
        xs = _moved(fragment.rule, fragment.parts, xs or [part.gather() for part in fragment.parts], arrived)
        self.put(fragment.parts, xs)
        if not self.by_fragment and not self.rule.overlaps:
            self.owner.end_steps()
        self._opens = bool(arrived.unfinished)
        return xs

    def _set_rates(self, fragment: Fragment) -> None:
        """Sets the parts' learning rates; where the rule counts in them, the mean over ranks, the same on all.

        Those of the last step, even where a scheduler has set the next one's already.
        """
        own = self.block.rates or rates_of(self.owner.param_groups)
        rates = torch.tensor(own, dtype=torch.float64, device="cpu")
        if self.rule.needs_rate:
            facts = f"learning rates of {self.what}"
            average_tensors([rates], self.comm, facts=facts, counts=fragment.done > 0)
        for part in fragment.parts:
            part.rate = float(rates[part.group])

    def _final(self, last: list[Tensor]) -> list[Tensor]:
        """Model at the end: the last mean or, where the last exchange had none, what all ranks hold.

        Where they do not hold the same, all are averaged once more: some rules leave ranks beside the mean, and ranks
        may have moved by steps of weight 0, or by what `average` never saw.
        """
        if last:
            return last
        models = self.before or [part.gather() for part in self.parts]
        own = torch.tensor([digest(by_name(self.parts, models))], device="cpu")
        alike = all(torch.equal(own, held) for held in self.comm.atomic(lambda: allgather(own, self.comm)))
        return models if alike else self.models(self.comm)


def shared_state(parts: Iterable[Part], rule: Rule) -> dict[str, Tensor]:
    """State of the rule that ranks share, by name: views."""
    return {
        f"{kept} of {name}": view
        for part in parts
        for kept in rule.shared_names
        for name, view in part.by_name(part[kept]).items()
    }


def _moved(rule: Rule, parts: list[Part], xs: list[Tensor], arrived: Arrived) -> list[Tensor]:
    """Applies the rule, with the means or, where there are none, without.

    At the end means are of blocks that no rank has completed: they are the model then, because a momentum over blocks
    would move it by as much as after whole ones.
    """
    if not arrived.means:
        return [rule.depart(part, x) for part, x in zip(parts, xs, strict=True)]
    if rule.gain() and not arrived.unfinished:
        for part, mean in zip(parts, arrived.means, strict=True):
            for name in rule.anchors:
                part[name].copy_(mean)
        return arrived.means
    for part in parts:
        part.weight = arrived.weight
    moved = rule.apply(parts, xs, arrived.means)
    for part in parts:
        part.last_rate = part.rate
    return moved
