"""Exchange of a model fragment by fragment: every parameter is in exactly one, and launched once a block."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from communicators import Communicator
from torch import Tensor, nn

from local_sgd.averaging import Arrived, Averaging, refuse_nonfinite
from local_sgd.compression import Compression
from local_sgd.driver import NEEDS, Driver
from local_sgd.parts import refuse_other_shapes
from local_sgd.rule import Part, Rule
from local_sgd.settings import whole

Fragments: TypeAlias = int | Sequence[nn.Module | Iterable[str]]
"""Number of fragments; or modules or names of parameters, one entry per fragment."""


@dataclass
class Fragment:
    """Fragment of a model, exchanged by itself, with a rule of its own.

    done, weight: steps since its last launch, and the sum of their weights.
    due: number of steps until the launched mean is applied; None where nothing is launched.
    """

    parts: list[Part]
    averaging: Averaging
    rule: Rule
    done: int = 0
    weight: float = 0.0
    due: int | None = None

    @property
    def names(self) -> list[str]:
        """Names of its parameters."""
        return [name for part in self.parts for name in part.names]

    def state_dict(self, *, waits: bool) -> dict[str, Any]:
        """State of the fragment: a launched mean is waited for, not applied; without a launch means are zeros."""
        arrived = Arrived([], 0.0, 0) if self.due is None else self.averaging.arrived(waits=waits)
        counts = {"done": self.done, "weight": self.weight, "launched": self.due is not None, "due": self.due or 0}
        return {"names": self.names, **counts, "arrived": arrived.state_dict(self.parts), **self.rule.state_dict()}

    def check(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError for a state that does not fit; changes nothing."""
        if sorted(state["names"]) != sorted(self.names):
            raise ValueError(f"the state is of a fragment of {state['names']}, this one is of {self.names}")
        refuse_other_shapes("arrived", state["arrived"]["means"], self.parts)
        self.rule.check(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state that `check` accepted."""
        self.averaging.store(Arrived.of_state(state["arrived"], self.parts))
        self.done, self.weight = state["done"], state["weight"]
        self.due = state["due"] if state["launched"] else None
        self.rule.load_state_dict(state)


class ByFragment(Driver):
    """Launches the exchange of one of F fragments every τ/F steps, and applies its mean `delay` steps later.

    The k-th of a block is launched after its step ⌊k·τ/F⌋, and applied before its next launch where that comes earlier.
    In an elastic group it is applied before the next launch of any, so that launches and means come in one order on all
    ranks, whatever their blocks.
    """

    overlaps = True
    needs = (*NEEDS, "turn", "launched", "fragments")

    def __init__(self, fragments: Fragments, delay: int, compression: Compression) -> None:
        super().__init__(compression)
        self._asked, self._delay = fragments, delay
        self._turn = self._launched = 0  # the next fragment; how many were launched in this block
        self._opens = False  # whether ranks may come and go after this step

    def facts(self) -> dict[str, Any]:
        """The delay besides."""
        return {"delay": self._delay, **super().facts()}

    def cut(self, trained: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        """Parameters by fragment."""
        return fragments_of(trained, self._asked)

    def connect(self) -> list[Averaging]:
        """Makes the fragments, each with its exchange and a rule begun for it."""
        self.fragments, rules = [], [self.rule, *(copy.copy(self.rule) for _ in self.pieces[1:])]
        for piece, rule in zip(self.pieces, rules, strict=True):
            parts = [part for part in self.parts if part.names[0] in piece]
            self.fragments.append(Fragment(parts, self.averaging_of(parts, rule, list(piece)), rule))
        named = zlib.crc32(repr([fragment.names for fragment in self.fragments]).encode())
        self.agree(f", {len(self.fragments)} fragments {named:08x}{self.fragments[0].rule.alike()}")
        return [fragment.averaging for fragment in self.fragments]

    def count(self, weight: float) -> None:
        """Counts a step, applies fragments that are due, and launches the next."""
        last = self.block.count(weight)
        for fragment in self.fragments:
            fragment.done, fragment.weight = fragment.done + 1, fragment.weight + weight
        for fragment in self._under_way():
            assert fragment.due is not None
            fragment.due -= 1
            if fragment.due <= 0:
                self._take(fragment)
        while self._launched < self._launches_by_now():
            self._launch(finished=False)
        if last:
            self.block.end()
            self._launched = 0
        if self._opens:  # only now, because a rank that leaves goes at once
            self._opens = False
            self.owner.let_in()

    def end(self, *, most: int | None) -> None:
        """Launches fragments, and applies each at once, until all were launched with all ranks finished."""
        for fragment in self._under_way():
            if self._take(fragment) and most is None:
                self.owner.let_in(at_once=True)
        ended = 0
        while ended < len(self.fragments):
            if unfinished := self._take(self._launch(finished=True)):
                if most is not None:
                    self.refuse_undrained(unfinished)
                self.owner.let_in(at_once=True)
            ended = 0 if unfinished else ended + 1
        self.put_model(self.anchors())
        self._launched = 0

    def models(self, comm: Communicator) -> list[Tensor]:
        """Anchors of all fragments."""
        return self.anchors()

    def state_dict(self, *, waits: bool = True) -> dict[str, Any]:
        """State of every fragment besides, and whose turn it is."""
        fragments = {str(turn): fragment.state_dict(waits=waits) for turn, fragment in enumerate(self.fragments)}
        own = {"turn": self._turn, "launched": self._launched, "fragments": fragments}
        return {**super().state_dict(), **own}  # waiting for fragments under way changes residuals

    def check(self, state: Mapping[str, Any]) -> None:
        """Checks the state of every fragment besides."""
        super().check(state)
        if len(state["fragments"]) != len(self.fragments):
            raise ValueError(f"the state is of {len(state['fragments'])} fragments, this is of {len(self.fragments)}")
        for turn, fragment in enumerate(self.fragments):
            fragment.check(state["fragments"][str(turn)])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores every fragment besides, and whose turn it is."""
        super().load_state_dict(state)
        for turn, fragment in enumerate(self.fragments):
            fragment.load_state_dict(state["fragments"][str(turn)])
        self._turn, self._launched = state["turn"], state["launched"]

    def join(self, state: Mapping[str, Any]) -> None:
        """Goes on from the state of another rank of an elastic group, with no steps of its own yet."""
        super().join(state)
        for fragment in self.fragments:
            fragment.done, fragment.weight = 0, 0.0

    def _under_way(self) -> list[Fragment]:
        """Fragments under way, in the order of their launches."""
        ordered = self.fragments[self._turn :] + self.fragments[: self._turn]
        return [fragment for fragment in ordered if fragment.due is not None]

    def _launches_by_now(self) -> int:
        count, τ = len(self.fragments), self.block.length
        return sum(max(1, k * τ // count) <= self.block.done for k in range(1, count + 1))

    def _launch(self, *, finished: bool) -> Fragment:
        fragment = self.fragments[self._turn]
        for earlier in self._under_way() if self.comm.elastic else [fragment] if fragment.due is not None else []:
            self._take(earlier)
        self.next_boundary(fragment.averaging)
        weight = 0.0 if fragment.done == 0 else fragment.weight if self._weighted else 1.0
        fragment.averaging.launch([part.gather() for part in fragment.parts], weight, finished=finished)
        fragment.done, fragment.weight, fragment.due = 0, 0.0, self._delay
        self._launched, self._turn = self._launched + 1, (self._turn + 1) % len(self.fragments)
        if self._turn == 0:
            self.share()
        if not self._delay and not finished:
            self._take(fragment)
        return fragment

    def _take(self, fragment: Fragment) -> int:
        """Applies a launched fragment; returns how many ranks had not finished at its launch."""
        arrived, fragment.due = fragment.averaging.arrived(), None
        refuse_nonfinite(fragment.parts, arrived.means, self.comm, self.what)
        if arrived.means:
            xs = [part.gather() for part in fragment.parts]
            for part, x in zip(fragment.parts, fragment.rule.apply(fragment.parts, xs, arrived.means), strict=True):
                part.put(x)
        self._opens = bool(arrived.unfinished)
        return arrived.unfinished


def fragments_of(trained: Mapping[str, Tensor], fragments: Fragments) -> list[dict[str, Tensor]]:
    """Cuts the parameters into fragments, none empty; as many as asked for, but no more than there are parameters.

    A number cuts them in their order, into about as many bytes each.

    Raises:
        TypeError: An entry is no fragment.
        ValueError: Parameters, which are named, are in no fragment or in two; or a name is none of theirs.
    """
    if isinstance(fragments, int):
        return _by_bytes(trained, whole("fragments", fragments, ", or modules or lists of names"))
    names = {id(p): name for name, p in trained.items()}
    cut = [[name for name in _names_in(one, names) if name in trained] for one in fragments]
    flat = [name for one in cut for name in one]
    if missing := [name for name in trained if name not in set(flat)]:
        raise ValueError(f"parameters in no fragment: {missing}; add a module or a list of names that has them")
    if twice := sorted({name for name in flat if flat.count(name) > 1}):
        raise ValueError(f"parameters in two fragments: {twice}")
    return [{name: trained[name] for name in one} for one in cut if one]


def _by_bytes(trained: Mapping[str, Tensor], count: int) -> list[dict[str, Tensor]]:
    """Ends a fragment where it reaches its share, or where each of the others needs one of the parameters left."""
    count = min(count, len(trained))
    nbytes = {name: p.numel() * p.dtype.itemsize for name, p in trained.items()}
    total, passed = sum(nbytes.values()), 0
    cut: list[dict[str, Tensor]] = [{}]
    for left, (name, p) in zip(range(len(trained), 0, -1), trained.items(), strict=True):
        lacking = count - len(cut)  # fragments that come after this one
        if cut[-1] and lacking and (passed * count >= len(cut) * total or left <= lacking):
            cut.append({})
        cut[-1][name] = p
        passed += nbytes[name]
    return cut


def _names_in(fragment: nn.Module | Iterable[str], names: Mapping[int, str]) -> list[str]:
    if isinstance(fragment, nn.Module):
        return [names[id(p)] for p in fragment.parameters() if id(p) in names]
    listed = [] if isinstance(fragment, str) else list(fragment)
    if not listed or not all(isinstance(name, str) for name in listed):
        raise TypeError(f"a fragment is {fragment!r}, expected a module or a list of names of parameters")
    if unknown := sorted(set(listed) - set(names.values())):
        raise ValueError(
            f"a fragment names {unknown}, which are no trained parameters; there are {list(names.values())}"
        )
    return listed
