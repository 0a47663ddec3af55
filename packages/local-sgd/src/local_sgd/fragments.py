"""Fragments of a model, each exchanged by itself: every parameter is in exactly one."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from replicas import check_like
from torch import Tensor, nn

from local_sgd.averaging import Arrived, Averaging
from local_sgd.parts import refuse_other_shapes
from local_sgd.rule import Part, Rule
from local_sgd.settings import whole

Fragments: TypeAlias = int | Sequence[nn.Module | Iterable[str]]
"""Number of fragments; or modules or names of parameters, one entry per fragment."""


@dataclass
class Fragment:
    """Parameters that are exchanged together, with a rule of their own: the whole model, or one of its fragments.

    apart: not the whole model. ranks: number for which the rule is prepared.
    done, weight: steps since its last launch, and the sum of their weights.
    due: number of steps until the launched mean is applied; None where nothing is launched.
    """

    parts: list[Part]
    averaging: Averaging
    rule: Rule
    apart: bool
    ranks: int
    done: int = 0
    weight: float = 0.0
    due: float | None = None

    @property
    def names(self) -> list[str]:
        """Names of its parameters."""
        return [name for part in self.parts for name in part.names]

    def state_dict(self, *, waits: bool) -> dict[str, Any]:
        """State of the exchange: a launched mean is waited for, not applied; without a launch means are zeros."""
        counts = {"done": self.done, "weight": self.weight, "launched": self.due is not None, "due": self.due or 0}
        state: dict[str, Any] = {"names": self.names, **counts} if self.apart else {}
        if self.apart or self.rule.overlaps:
            arrived = Arrived([], 0.0, 0) if self.due is None else self.averaging.arrived(waits=waits)
            state["arrived"] = arrived.state_dict(self.parts)
        return {**state, **self.rule.state_dict()}

    def check(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError for a state that does not fit; changes nothing."""
        if self.apart:
            check_like(state, {"names": [""], "done": 0, "weight": 0.0, "launched": False, "due": 0.0}, "a fragment")
        if self.apart or self.rule.overlaps:
            check_like(state["arrived"], {"means": {}, "weight": 0.0, "unfinished": -1, "since": ""}, "arrived")
        if self.apart and sorted(state["names"]) != sorted(self.names):
            raise ValueError(f"the state is of a fragment of {state['names']}, this one is of {self.names}")
        if self.apart or self.rule.overlaps:
            refuse_other_shapes("arrived", state["arrived"]["means"], self.parts)
        self.rule.check(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state that `check` accepted."""
        if self.apart or self.rule.overlaps:
            self.averaging.store(Arrived.of_state(state["arrived"], self.parts))
        counts = state if self.apart else state["block"]
        self.done, self.weight = counts["done"], counts["weight"]
        if self.apart:
            self.due = state["due"] if state["launched"] else None
        self.rule.load_state_dict(state)


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
