"""Warnings about an optimizer that uses the means of a sparse exchange in a way known to learn badly.

An adapter that wraps the optimizer shows it to its watch. A DDP hook, and HSDP, see gradients only: torch tells their
watches of every optimizer's step, and they look at those that hold their parameters.
"""

import math
import warnings
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from replicas import default_group
from sparse_compress import TopK
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from data_parallel.adam_step_correction import knows
from data_parallel.settings import Settings

EVERY = 7
"""Steps from one look to the next, which takes two passes over the gradients, and waits for a GPU."""
ENOUGH = 0.1
"""Density from which on Adam behind a selection is not warned about."""
ADAPTS = (torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.Adafactor, torch.optim.Rprop)
"""Optimizers without "betas" that divide by the size of their gradients."""

TWICE = (
    "momentum is on twice: before the selection (momentum=) and in the optimizer, after it, where it repeats the few "
    "entries that were sent; training may not learn at all: leave the optimizer's at 0"
)
CYCLED = ". OneCycleLR and CyclicLR set it, unless they are given cycle_momentum=False"
CLEARED = (
    "momentum={momentum} has little effect at a density of {density:g}: as in Deep Gradient Compression it is cleared "
    "wherever an entry is sent. Send less, such as density=0.01, or everything, by algorithm='dense' with the momentum "
    "in the optimizer"
)
ADAPTIVE_TWICE = (
    "momentum= and {name}, which has one of its own: it learns worse than with either alone. {instead}, and leave "
    "momentum= out"
)
ADAPTIVE = (
    "{name} behind a sparse exchange: it sees few entries at a time, each with what many steps have saved up, and "
    "takes them for noise, so it learns more slowly than with dense gradients. {instead}"
)
MUON = (
    "{name} behind a sparse exchange: it makes whole matrices of the few entries that it sees at a time. Take "
    "algorithm='powersgd', which sends something of every element"
)
SEARCHES = (
    "LBFGS behind a sparse exchange: it compares gradients of which each has other entries, and diverges. Send all of "
    "them, by algorithm='dense', or take SGD"
)
SHORTER = (
    "the steps of {name} on {ranks} ranks are up to {times:.1f} times too short, if it divides by the size of its "
    "gradients, because a rank's own are noisier than their mean. That is corrected for Adam, AdamW, NAdam and RMSprop "
    "alone: take one of these, a higher learning rate, or DistributedOptimizer(..., algorithm='powersgd'), which gives "
    "it the mean gradient"
)
CLIPPED = (
    "the gradients were scaled down between the exchange and step(). After a sparse exchange p.grad holds what its few "
    "entries had saved up, and what clipping takes of that is lost, so training slows down. Clip before the exchange "
    "instead: {owner}(..., clip_norm=...), and leave the call out"
)
NOT_REGISTERED = (
    "an optimizer takes steps among {size} ranks, but DDP has brought no gradient to this SparseHookState: the hook is "
    "not registered (or all backwards so far were in no_sync()). Call ddp.register_comm_hook(state, sparse_hook); "
    "under Lightning on a CPU, and Accelerate, take data_parallel.integrations"
)


class OptimizerWatch:
    """Compares the gradients that an optimizer has stepped with to those that the exchange gave, and judges it.

    Args:
        owner: The class that takes clip_norm=.
        instead: The remedy for Adam.
        settings: Those of the exchange.
        compares: Whether gradients reach the step as the exchange gave them, without a GradScaler's scale.

    Attributes:
        given: Norms of gradients that were noted, by parameter; None: not to be compared.
        awaited: Ids of parameters of which DDP has brought none yet.
    """

    def __init__(self, owner: str, instead: str, settings: Settings, *, compares: bool = True) -> None:
        self._owner, self._instead, self._settings, self._compares = owner, instead, settings, compares
        self.given: dict[Tensor, Tensor | None] = {}
        self.awaited: set[int] = set()
        self._factors: WeakKeyDictionary[Optimizer, float] = WeakKeyDictionary()  # of the last look
        self._said: set[str] = set()

    def follow(self, awaited: Iterable[Tensor] = ()) -> None:
        """Has torch tell of every optimizer's step. awaited: parameters that DDP should bring before one is stepped."""
        self.awaited = {id(p) for p in awaited}
        _hooked()
        _WATCHES.add(self)

    def note(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor], step: int) -> None:
        """Notes gradients as the exchange gives them, in every `EVERY`-th step; again for a backward that adds to them.

        Norms tell nothing where all entries were sent.
        """
        if step % EVERY != 1:
            self.given.clear()  # of a step that was never taken
            return
        compares = self._compares and getattr(self._settings.compressor, "density", 0.0) < 1
        self.given.update(zip(parameters, _norms(gradients) if compares else [None] * len(gradients), strict=True))

    def look(self, optimizer: Optimizer) -> None:
        """Checks an optimizer that has stepped, and left its gradients in place."""
        if not self.given and not self.awaited:
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        moves = any(group.get("lr") != 0 for group in optimizer.param_groups)  # torch makes a state by a step without
        if moves and any(id(p) in self.awaited and p.grad is not None for p in parameters):
            group = default_group()
            if group is not None and group.size() > 1:
                self.awaited.clear()
                self.say(NOT_REGISTERED.format(size=group.size()), stacklevel=5)
        if held := [p for p in parameters if p in self.given]:
            ours = [group for group in optimizer.param_groups if any(p in self.given for p in group["params"])]
            self.say(self.judgement(optimizer, ours), stacklevel=5)
            noted = [(p.grad, norm) for p in held if (norm := self.given.pop(p)) is not None and p.grad is not None]
            if noted and self._clips(optimizer, *_both_norms(noted)):
                self.say(CLIPPED.format(owner=self._owner), stacklevel=5)

    def _clips(self, optimizer: Optimizer, given: float, left: float) -> bool:
        """Whether a norm has shrunk, by another factor than in the last look.

        By the same one each time a mean was divided, such as by a number of tokens, which loses nothing.
        """
        factor = left / given if given else 1.0
        before, self._factors[optimizer] = self._factors.get(optimizer, factor), factor
        return factor < 0.999 and not math.isclose(factor, before, rel_tol=0.01)

    def judgement(self, optimizer: Optimizer, groups: Sequence[dict[str, Any]]) -> str | None:
        """Warning, with a remedy, about an optimizer known to learn badly from selections; None for any other.

        groups: Those of its parameter groups that are exchanged.
        """
        name, momentum = type(optimizer).__name__, self._settings.momentum
        if any("ns_steps" in group for group in groups):
            return MUON.format(name=name) if self._settings.last_density < ENOUGH else None
        if isinstance(optimizer, torch.optim.LBFGS):
            return SEARCHES if self._settings.last_density < 1 else None
        has_betas = any("betas" in group for group in groups)
        if momentum and has_betas:
            return ADAPTIVE_TWICE.format(name=name, instead=self._instead)
        if momentum and any(group.get("momentum", 0) for group in groups):
            return TWICE + (CYCLED if any("base_momentum" in group for group in groups) else "")
        if (has_betas or isinstance(optimizer, ADAPTS)) and self._settings.last_density < ENOUGH:
            return ADAPTIVE.format(name=name, instead=self._instead)
        density = self._settings.last_density
        cleared = isinstance(self._settings.compressor, TopK) and 1 - momentum < density < 1
        return CLEARED.format(momentum=momentum, density=density) if momentum and cleared else None

    def say(self, text: str | None, *, stacklevel: int) -> None:
        """Issues a UserWarning, unless it was issued before."""
        if text is not None and text not in self._said:
            self._said.add(text)
            warnings.warn(text, stacklevel=stacklevel)


def too_short(optimizer: Optimizer, ranks: int) -> str | None:
    """Warning about an optimizer whose own updates on several ranks are too short; None for any other."""
    if ranks == 1 or knows(optimizer):
        return None
    return SHORTER.format(name=type(optimizer).__name__, ranks=ranks, times=math.sqrt(ranks))


_WATCHES: WeakSet[OptimizerWatch] = WeakSet()


@cache
def _hooked() -> Any:
    """Registers one hook for all watches, which stays: torch iterates over its hooks while it calls them."""
    return register_optimizer_step_post_hook(_stepped)


def _stepped(optimizer: Optimizer, *_: Any) -> None:
    for watch in list(_WATCHES):
        watch.look(optimizer)


def part_of(tensor: Any) -> Tensor:
    """This rank's part of a DTensor; any other tensor as it is."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach()


def _norms(gradients: Sequence[Tensor]) -> list[Tensor]:
    return [torch.linalg.vector_norm(g, dtype=torch.promote_types(g.dtype, torch.float32)) for g in gradients]


def _both_norms(noted: Sequence[tuple[Tensor, Tensor]]) -> tuple[float, float]:
    """Norm that was given, and what is left of it, without gradients that were zeroed, as of a frozen layer."""
    left = _norms([part_of(gradient) for gradient, _ in noted])
    given, taken = (
        torch.stack([norm.to(left[0].device, torch.float64) for norm in norms])
        for norms in ([norm for _, norm in noted], left)
    )
    return float((given * (taken > 0)).norm()), float(taken.norm())
