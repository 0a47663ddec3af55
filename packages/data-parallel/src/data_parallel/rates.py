"""Separate selections for groups with different learning rates, because updates are proportional to the rate.

In one selection by magnitude a group with a hundredth of another's rate would wait until it has saved up a hundred
times as many updates: at 1 % it stood still for a thousand steps and more, as the body of a model does that is
fine-tuned below a new head. Each by itself sends the same share, and moves as fast as the others.
"""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from communicators import Bucket, buckets_of
from torch import Tensor
from torch.optim import Optimizer

ALIKE = 2.0
"""Rates within this factor share a selection: a decay over layers would else make an exchange of each layer."""

Groups = Sequence[Mapping[str, Any]]


class ByRates:
    """Cuts parameters into buckets of similar rates, and again when the rates change enough for other buckets."""

    def __init__(self, optimizer: Optimizer, parameters: Sequence[Tensor], nbytes: int | None) -> None:
        self._optimizer, self._parameters, self._nbytes = optimizer, parameters, nbytes
        self._classes = self._classes_of(optimizer.param_groups)

    def changed(self, groups: Groups | None = None) -> bool:
        """Whether the rates, of the optimizer's groups or of those that it is about to get, ask for other buckets."""
        before, self._classes = self._classes, self._classes_of(groups or self._optimizer.param_groups)
        return self._classes != before

    def buckets(self) -> list[Bucket]:
        """Buckets as `buckets_of` cuts them, class by class; highest rates first."""
        return [bucket for members in self._classes for bucket in self._buckets_of(members)]

    @property
    def facts(self) -> str:
        """Facts of the cut that all ranks share, as text; empty if all rates are similar."""
        if len(self._classes) <= 1:
            return ""
        return f", cut by learning rates into {len(self._classes)} ({zlib.crc32(repr(self._classes).encode()):08x})"

    def _classes_of(self, groups: Groups) -> list[list[int]]:
        """Classes of members with similar rates."""
        pairs = zip(groups, self._optimizer.param_groups, strict=False)  # a state's other groups are refused elsewhere
        rates = {id(p): _rate(group) for group, own in pairs for p in own["params"]}
        members = [(-rates.get(id(p), 1.0), member) for member, p in enumerate(self._parameters)]
        classes: list[tuple[float, list[int]]] = []
        for negative, member in sorted(members):
            if not classes or -negative * ALIKE < classes[-1][0]:
                classes.append((-negative, []))
            classes[-1][1].append(member)
        return [sorted(members) for _, members in classes]

    def _buckets_of(self, members: Sequence[int]) -> list[Bucket]:
        made = buckets_of([self._parameters[member] for member in members], self._nbytes)
        return [replace(bucket, members=tuple(members[position] for position in bucket.members)) for bucket in made]


def _rate(group: Mapping[str, Any]) -> float:
    """Learning rate of a group; its initial one if a scheduler has set it to 0; 1 if it has none."""
    return float(group.get("lr", 1.0)) or float(group.get("initial_lr", 0.0))
