"""DDP's buckets as ours: which parameters lie where, and which part of their gradients is new.

DDP exchanges all of p.grad in every synchronised backward. A mean of dense gradients leaves what it held as it was: the
mean, shared by all ranks, of earlier backwards of the same step. A selection with error feedback would count that
twice. So only the new part may be exchanged.
"""

from collections.abc import Hashable, Iterable, Sequence

import torch
from communicators import Bucket
from replicas import check_named_parameters
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from data_parallel.watching import watch


def exchanged(given: DistributedDataParallel | Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Names and parameters without those that DDP is told to ignore.

    given: The DDP module, which knows them by the reducer's names; or pairs, where torch's marks tell. Marks stay: all
    have one in a DDP of their own, inside that which ignores them.
    """
    if isinstance(given, DistributedDataParallel):
        theirs = {
            id(p)
            for at, module in given.module.named_modules()
            for name, p in module.named_parameters(recurse=False)
            if f"{at}.{name}" not in given.parameters_to_ignore
        }
        named = [(name, p) for name, p in given.module.named_parameters() if id(p) in theirs]
        return list(check_named_parameters(named).items())
    named = list(check_named_parameters(list(given)).items())
    return [(name, p) for name, p in named if not getattr(p, "_ddp_ignored", False)] or named


class Buckets:
    """Buckets of DDP. names: of all parameters by position; unnamed ones are numbered as DDP first brings them."""

    def __init__(self, named: Sequence[tuple[str, Tensor]], known: Sequence[tuple[str, Tensor]] = ()) -> None:
        self._all_are_named = bool(named)
        self.parameters = dict([*named, *known])  # kept, so that no id is used twice
        self.names = list(self.parameters)
        self._positions = {id(p): position for position, p in enumerate(self.parameters.values())}
        self._known: dict[Hashable, Bucket] = {}

    def of(self, parameters: Sequence[Tensor], flat: Tensor) -> Bucket:
        """The bucket of these parameters, which DDP has laid into `flat`.

        TypeError for a complex one, ValueError for one that is not among those that were named.
        """
        key = tuple(map(id, parameters)), flat.numel(), flat.dtype, flat.device
        if key not in self._known:
            self._known[key] = self._made(parameters, flat)
        return self._known[key]

    def _made(self, parameters: Sequence[Tensor], flat: Tensor) -> Bucket:
        for p in parameters:
            if id(p) in self._positions:
                continue
            if self._all_are_named:
                raise ValueError(
                    f"DDP brings a parameter of shape {tuple(p.shape)} that is not among named_parameters: "
                    "give those of the module that DDP wraps, all of them, or the DDP module itself"
                )
            name, self._positions[id(p)] = f"parameter {len(self.names)}", len(self.names)
            self.names.append(name)
            self.parameters[name] = p
        members = tuple(self._positions[id(p)] for p in parameters)
        if wrong := [self.names[m] for m, p in zip(members, parameters, strict=True) if p.is_complex()]:
            raise TypeError(
                f"complex parameter {wrong[0]!r}: give DDP its real view, nn.Parameter(torch.view_as_real(p)), and "
                "take torch.view_as_complex of that in forward"
            )
        shapes, strides = tuple(p.shape for p in parameters), tuple(map(_strides_in_bucket, parameters))
        return Bucket(members, shapes, flat.dtype, flat.device, strides)


class Accumulated:
    """Watches p.grad by hooks on the parameters, which run before autograd adds to it.

    After an exchange p.grad holds a mean. The next backward of p looks once: nothing there, or zeros, is a new step, if
    no other parameter holds one in this backward (of a selection a mean may be all zeros); else a copy is p's base
    until the next exchange, also through backwards in no_sync() in between. A parameter that is not used has no
    backward: all that its bucket brings is what it held. A step of one backward costs a look at `p.grad is None`.
    """

    def __init__(self) -> None:
        self._parameters: dict[int, Tensor] = {}
        self._holding: set[int] = set()  # p.grad is a mean, or has been set to zero since
        self.bases: dict[int, Tensor] = {}
        self._doubtful: set[int] = set()  # bases from before a zero_grad() that was seen at another parameter
        self._seen = False  # whether any hook ran since the last whole exchange
        self._backward, self._added = -1, set[int]()  # the one that ran last, and its bases, which are beyond doubt

    def goes_on(self) -> bool:
        """Whether this backward adds to an exchanged mean, so that it belongs to the same step."""
        return len(self.bases) > len(self._doubtful)

    def take_out(
        self, bucket: Bucket, flat: Tensor, parameters: Sequence[Tensor], *, last: bool
    ) -> list[tuple[int, Tensor]]:
        """Leaves only the new part in a bucket; returns the earlier content, by position in the bucket.

        Raises RuntimeError if the two cannot be told apart. last: this bucket ends the backward.
        """
        held = []
        if self.bases or not self._holding.isdisjoint(bucket.members):
            for position, (member, view) in enumerate(zip(bucket.members, bucket.views(flat), strict=True)):
                if (base := self._base(member, view)) is not None:
                    held.append((position, base))
                    view.sub_(base)
        new = {m: p for m, p in zip(bucket.members, parameters, strict=True) if m not in self._parameters}
        if new:
            self._parameters |= new
            watch(self, new, Accumulated._look, before=True)
        self._holding.update(bucket.members)
        self._seen &= not last
        return held

    def _base(self, member: int, view: Tensor) -> Tensor | None:
        base = self.bases.pop(member, None)
        if base is not None:
            gone = member in self._doubtful and (self._parameters[member].grad is None or not bool(view.any()))
            self._doubtful.discard(member)
            return None if gone else base
        if member not in self._holding:
            return None
        if not self._seen and bool(view.any()):
            raise RuntimeError(
                "the parameters' hooks, which tell a gradient's new part from the mean it held, were removed: make "
                "a new SparseHookState, and accumulate inside no_sync(), all but the last backward of a step"
            )
        return view.clone()

    @torch.no_grad()
    def _look(self, member: int) -> None:
        """Looks at what p.grad holds, before autograd adds to it."""
        self._seen = True
        if member not in self._holding and member not in self.bases:
            return
        if (backward := torch._C._current_graph_task_id()) != self._backward:
            self._backward, self._added = backward, set()
        old = self._parameters[member].grad
        if old is None or ((old.is_cpu or member in self.bases) and not bool(old.any())):
            self._holding.discard(member)
            self.bases.pop(member, None)
            self._doubtful.update(self.bases.keys() - self._added)
        else:
            self._added.add(member)
            if member in self._holding:
                self._holding.discard(member)
                self.bases[member] = old.detach().clone()
        self._doubtful.discard(member)


def _strides_in_bucket(parameter: Tensor) -> tuple[int, ...]:
    """Strides of a gradient in DDP's bucket: those of the parameter if it has no gaps in memory, else row by row."""
    dense = torch.empty_like(parameter, device="meta")  # keeps the strides exactly where there are no gaps
    return dense.stride() if dense.stride() == parameter.stride() else dense.contiguous().stride()
