"""Content of p.grad when a backward begins: the mean, shared by all ranks, of earlier backwards of the same step.

DDP exchanges all of p.grad in every synchronised backward. A mean of dense gradients leaves that content as it was; a
selection with error feedback would count it twice. So only the new part may be exchanged.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from communicators import Bucket
from torch import Tensor


class Accumulated:
    """Watches p.grad by hooks on the parameters, which run before autograd adds to it.

    After an exchange p.grad holds a mean. The next backward of p looks once: nothing there, or zeros, is a new step;
    else a copy is p's base until the next exchange, also through backwards in no_sync() in between. A parameter that
    is not used has no backward: all that its bucket brings is what it held.
    A step of one backward costs a look at `p.grad is None`.
    """

    def __init__(self) -> None:
        self._parameters: dict[int, Tensor] = {}
        self._holding: set[int] = set()  # p.grad is a mean, or has been set to zero since
        self._bases: dict[int, Tensor] = {}
        self._doubtful: set[int] = set()  # bases from before a zero_grad() that was seen at another parameter
        self._seen = False  # whether any hook ran since the last whole exchange

    def watch(self, members: Sequence[int], parameters: Sequence[Tensor]) -> None:
        """Starts watching these parameters, each once."""
        for member, p in zip(members, parameters, strict=True):
            if member not in self._parameters:
                self._parameters[member] = p
                p.register_hook(partial(_tell, weakref.ref(self), member))  # type: ignore[no-untyped-call]

    @property
    def goes_on(self) -> bool:
        """Whether this backward adds to an exchanged mean, so that it belongs to the same step."""
        return len(self._bases) > len(self._doubtful)

    def take_out(self, bucket: Bucket, flat: Tensor) -> dict[int, Tensor]:
        """Leaves only the new part in a bucket; returns the earlier content by position in the bucket.

        Raises RuntimeError if the two cannot be told apart.
        """
        held: dict[int, Tensor] = {}
        if self._bases or not self._holding.isdisjoint(bucket.members):
            for position, (member, view) in enumerate(zip(bucket.members, bucket.views(flat), strict=True)):
                if (base := self._base(member, view)) is not None:
                    held[position] = base
                    view.sub_(base)
        self._holding.update(bucket.members)
        return held

    def whole(self) -> None:
        """Notes that the last bucket of a backward has been taken."""
        self._seen = False

    def look(self, member: int) -> None:
        """Records this parameter's gradient before a backward adds to it."""
        self._seen = True
        old = self._parameters[member].grad
        marked = member in self._holding or member in self._bases
        if not marked:
            return
        if old is None or (old.is_cpu and not bool(old.any())) or (member in self._bases and not bool(old.any())):
            self._holding.discard(member)
            self._bases.pop(member, None)
            self._doubtful.update(self._bases)
        elif member in self._holding:
            self._holding.discard(member)
            self._bases[member] = old.detach().clone()
        self._doubtful.discard(member)

    def _base(self, member: int, view: Tensor) -> Tensor | None:
        base = self._bases.pop(member, None)
        if base is not None:
            gone = member in self._doubtful and (self._parameters[member].grad is None or not bool(view.any()))
            self._doubtful.discard(member)
            return None if gone else base
        if member not in self._holding:
            return None
        if not self._seen and bool(view.any()):
            raise RuntimeError(
                "the hooks did not run that tell a gradient's new part from the mean that it may have held; they were "
                "removed from the parameters: make a new SparseHookState, and accumulate inside no_sync(), all but "
                "the last backward of a step"
            )
        return view.clone()


def put_back(bucket: Bucket, mean: Tensor, held: Mapping[int, Tensor]) -> Tensor:
    """The mean of what is new and, added to it, what the gradients held."""
    if held:
        views = bucket.views(mean)
        for position, base in held.items():
            views[position].add_(base)
    return mean


def _tell(accumulated: weakref.ref[Accumulated], member: int, gradient: Tensor) -> None:
    """Hook of a parameter; does nothing once the state that set it is gone."""
    del gradient
    watching = accumulated()
    if watching is not None:
        with torch.no_grad():
            watching.look(member)
