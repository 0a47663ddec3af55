"""DDP round the same parameters: it sums dense gradients before a wrapper of the optimizer exchanges anything."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterable
from itertools import compress
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from replicas.default_group import default_group

LOOKS = 4
"""Number of first steps that are looked at; DDP with static_graph=True says nothing in its first backward."""
SAID = (
    "DistributedDataParallel sums these gradients whole, among the same ranks, before this {owner} has them, which so "
    "saves nothing: "
)
HOOKED = (
    "DistributedDataParallel's hook {hook!r} has these gradients before this {owner}, which saves nothing where the "
    "hook exchanges them too (of torch's noop_hook it is known that it does not): "
)
INSTEAD = "give the model without DDP, or put forward and backward of every step into `with ddp.no_sync():`"


class InsideDDP:
    """Warns once where DDP exchanges the gradients of these parameters too, among all ranks of a wrapper.

    A DDP module keeps when it met each gradient of its last exchange. Backwards in `no_sync()`, or of the plain module,
    leave that as it was, so between two steps it tells whether DDP has exchanged. DDP inside a node, and the wrapper
    between nodes, is as it should be.

    Modules that were there when gc.freeze() was called are not found.

    comm: as the user gave it. owner: the wrapper. instead: what else to do.
    """

    def __init__(self, parameters: Iterable[Tensor], comm: Any, *, owner: str, instead: str = "") -> None:
        self._ids, self._comm = {id(p) for p in parameters}, comm
        self._owner, self._instead, self._looks = owner, INSTEAD + instead, LOOKS
        self._seen: WeakKeyDictionary[DistributedDataParallel, list[int]] | None = None

    def look(self) -> None:
        """Looks for DDP's exchange after each backward, first among all live objects, if there is a process group."""
        if self._looks and default_group() is not None:
            self._looks -= 1
            before = self._seen
            modules = self._modules() if before is None else list(before)
            now = self._seen = WeakKeyDictionary({module: _met(module) for module in modules})
            exchanged = [module for module in modules if before is not None and now[module] != before[module]]
            if exchanged or not modules:
                self._looks = 0
            if exchanged:
                warnings.warn(self._said(exchanged[0]), stacklevel=5)

    def _modules(self) -> list[DistributedDataParallel]:
        if _is_alone(self._comm):
            return []
        return [one for one in _alive() if self._has_ours(one) and _covers(one.process_group, self._comm)]

    def _has_ours(self, module: DistributedDataParallel) -> bool:
        named, ignored = module.module.named_parameters(), module.parameters_to_ignore
        return any(id(p) in self._ids and name not in ignored for name, p in named)

    def _said(self, module: DistributedDataParallel) -> str:
        names = [getattr(hook, "__qualname__", repr(hook)) for hook, _ in module._comm_hooks if not _is_torchs(hook)]
        said = HOOKED.format(hook=names[0], owner=self._owner) if names else SAID.format(owner=self._owner)
        return said + self._instead


def _alive() -> list[DistributedDataParallel]:
    """DDP modules of the process, by their exact types, since `isinstance` takes a second for five million objects."""
    objects, kinds = gc.get_objects(), {id(kind) for kind in _kinds(DistributedDataParallel)}
    return list(compress(objects, map(kinds.__contains__, map(id, map(type, objects)))))


def _kinds(kind: type) -> set[type]:
    return {kind}.union(*map(_kinds, kind.__subclasses__()))


def _met(module: DistributedDataParallel) -> list[int]:
    """Times at which a module met gradients, in ns after backward began; none where its hook sends nothing."""
    if any(_is_torchs(hook) and hook.__name__ == "noop_hook" for hook, _ in module._comm_hooks):
        return []
    return list(module.reducer.get_backward_stats())


def _is_torchs(hook: Any) -> bool:
    """Whether a hook is torch's own; all of those but noop_hook exchange."""
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.")


def _is_alone(comm: Any) -> bool:
    size = getattr(comm, "size", None)  # a method of process groups
    return bool((size() if callable(size) else size) == 1)


def _covers(group: Any, comm: Any) -> bool:
    """Whether all ranks of a wrapper are in DDP's group; of a communicator without a process group only if all are."""
    if group.size() == dist.get_world_size():
        return bool(group.size() > 1)
    if not isinstance(comm, dist.ProcessGroup):
        return False
    return set(dist.get_process_group_ranks(comm)) <= set(dist.get_process_group_ranks(group))
