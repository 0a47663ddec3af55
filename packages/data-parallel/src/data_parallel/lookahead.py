"""Gradients where this rank would be, had its own updates been applied: parameters + a · residual.

At density ρ an entry of an update waits about 1/ρ steps. Meanwhile gradients at the shared parameters, which know
nothing of what waits, ask for the same again. What will be added is the mean over ranks of the residuals, and a rank
knows one of them. Two guesses, which are one on a single rank:

    a = 1      what waits elsewhere is like its own. The mean over ranks of p + r is p + the mean of what waits: the
               parameters of a training in which nothing waits.
    a = 1/P    what waits elsewhere is unknown: p + r/P is p once all of its own has been sent.

The first is right of signal, the second of noise, which differs from rank to rank. An optimizer that divides by the
size of its gradients makes its updates alike in size, so that most of a residual is noise: it takes the second. For
SGD, in whose residuals the large entries are signal, the first was measured to be better. (Errors that are applied
locally: CSER, Xie et al., NeurIPS 2020; a step ahead of the error: Xu et al., AAAI 2021.)
"""

import functools
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from replicas import restored
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from data_parallel.adam_step_correction import in_batches
from data_parallel.exchange import Exchange
from data_parallel.watching import watch

LOOKS = 100
"""First steps whose backwards are watched in ahead(): a regulariser may have a backward at every 16th only."""
LATE = (
    "the gradients of this step were made without what waits in the residuals: at a density of {density:g} an update "
    "waits about {wait:,.0f} steps, and until then each gradient asks for it again, so training is slower, or worse. "
    "Put forward and backward into `with optimizer.ahead():`, or make it by UpdateOptimizer.for_model, which does that "
    "until another wrapper is made of its parameters"
)
BOTH = (
    "of this step some gradients were made inside ahead(), others outside, without what waits in the residuals: put "
    "every forward and backward of a step into `with optimizer.ahead():`"
)
NONE = (
    "something was computed inside ahead(), but no gradient; outside its backward fails with torch's 'modified by an "
    "inplace operation'. Put forward and backward of a step into `with optimizer.ahead():`"
)
WRITTEN = (
    "{name!r} was written to inside ahead() of an UpdateOptimizer, which is undone: load, clamp or change parameters "
    "outside, where they are those of all ranks. Where another optimizer trains them now, call the UpdateOptimizer's "
    "unfollow() before"
)


class ErrorLookahead:
    """Moves parameters by this rank's residuals of updates, and back; knows whether gradients were computed there.

    exchange: has the residuals. share: gives a. Memory: a copy of the parameters while they are ahead.
    """

    def __init__(self, named: Mapping[str, Tensor], exchange: Exchange, share: Callable[[], float]) -> None:
        self._names, self._parameters = list(named), list(named.values())
        self._exchange, self._share = exchange, share
        self.now = False
        self._used = self._warned = self._made = self._told = False
        self._looks = LOOKS
        self._hooks: list[weakref.finalize[..., Any]] = []  # each removes its own
        self._there = list[int](), torch.empty(0, device="cpu")  # their versions and bits when they were put ahead
        self._given = self._latest = list[tuple[int, int] | None]()  # gradients then, and before the latest forward
        self._watched: set[int] = set()
        self._outside: set[int] = set()  # parameters with gradients made elsewhere in this step

    @contextmanager
    def for_gradients(self) -> Iterator[None]:
        """Context for computing gradients, in which parameters are ahead; afterwards they have their former bits."""
        if self.now:
            raise RuntimeError("ahead() inside ahead(): parameters are there already, leave out one of the two")
        self._used = True
        self._watch()
        with self._moved():
            self._there = self._seen(), _bits(self._parameters)
            self._made, computed, self._given = False, _nodes(), self._gradients()
            try:
                yield
            except GeneratorExit:  # who would leave is gone
                if written := self.written():
                    warnings.warn(written, stacklevel=2)
                raise
            self._made |= self._given != self._gradients()
            computes, written = computed != _nodes(), self.written()
        if written:
            raise RuntimeError(written)
        if computes and not self._made and not self._told and any(remove.alive for remove in self._hooks):
            self._told = True
            warnings.warn(NONE, stacklevel=3)

    def written(self, *, quickly: bool = False) -> str | None:
        """Text about a parameter that was written to since it is ahead. quickly: by anything but `.data`."""
        seen, bits = self._there
        changed = [now != then for now, then in zip(self._seen(), seen, strict=True)]
        if not quickly and not any(changed):
            changed = (_bits(self._parameters) != bits).tolist()
        name = next((name for name, differs in zip(self._names, changed, strict=True) if differs), None)
        return None if name is None else WRITTEN.format(name=name)

    @property
    def made(self) -> bool:
        """Whether a gradient has been added to since parameters are ahead."""
        return self._added_to(self._given)

    @property
    def waits(self) -> bool:
        """Whether none has been added to since the latest forward in training, whose backward may be yet to come."""
        return not self._added_to(self._latest)

    def note_forward(self) -> None:
        """Notes that a forward in training begins."""
        self._latest = self._gradients()

    def _added_to(self, before: list[tuple[int, int] | None]) -> bool:
        pairs = zip(before, self._gradients(), strict=True)
        return any(then != now and self._holds(member) for member, (then, now) in enumerate(pairs))

    def _seen(self) -> list[int]:
        return [p._version for p in self._parameters]

    def for_step(self, density: float) -> Callable[[], AbstractContextManager[None]]:
        """Makes the context for the wrapped optimizer's step, each time that it is called.

        Parameters are where gradients were computed in it, for weight decay. Warns once if these lack the residuals.
        density: that of the steps to come.
        """
        used, self._used = self._used, False
        outside, self._outside = any(self._holds(member) for member in self._outside), set()
        self._looks -= used
        warns = density < 1 and not self._warned and (outside or not used)
        self._warned |= warns
        if self._warned or self._looks <= 0:
            for remove in self._hooks:
                remove()
        if warns:
            warnings.warn(BOTH if used else LATE.format(density=density, wait=1 / density), stacklevel=5)
        return self._moved if used else nullcontext

    def adds(self, member: int) -> None:
        """Notes that a backward reaches this parameter; a gradient that was discarded no longer counts."""
        self._made |= self.now
        if member in self._outside and not self._holds(member):
            self._outside.discard(member)

    def added(self, member: int) -> None:
        """Notes that a backward has added to this parameter's gradient; `torch.autograd.grad` does not."""
        if not self.now:
            self._outside.add(member)

    def _holds(self, member: int) -> bool:
        gradient = self._parameters[member].grad
        return gradient is not None and bool(gradient.any())

    @property
    def learns(self) -> bool:
        """Whether any of its parameters is to get a gradient now."""
        return any(p.requires_grad for p in self._parameters)

    def _watch(self) -> None:
        """Sets hooks that run before and after autograd adds to a gradient, until all is known or this object dies."""
        if self._warned or self._looks <= 0:
            return
        new = {at: p for at, p in enumerate(self._parameters) if p.requires_grad and at not in self._watched}
        if new:
            self._watched |= new.keys()
            self._hooks += [watch(self, new, ErrorLookahead.adds, before=True), watch(self, new, ErrorLookahead.added)]

    def _gradients(self) -> list[tuple[int, int] | None]:
        """Snapshot of the gradients in which a change of them shows."""
        return [None if p.grad is None else (id(p.grad), p.grad._version) for p in self._parameters]

    @contextmanager
    def _moved(self) -> Iterator[None]:
        residuals, share = self._exchange.error_state()["residuals"], self._share()
        waiting = {
            p: residuals[name] for name, p in zip(self._names, self._parameters, strict=True) if name in residuals
        }
        with restored(self._parameters):
            with torch.no_grad():
                for moved in in_batches(list(waiting)):
                    torch._foreach_add_(moved, [waiting[p].to(p.dtype) for p in moved], alpha=share)
            self.now = True
            torch.clear_autocast_cache()  # of parameters that are elsewhere now
            try:
                yield
            finally:
                self.now = False
                torch.clear_autocast_cache()


def _bits(tensors: Sequence[Tensor]) -> Tensor:
    """Sum of each tensor's bits, which is the same in any order: eight bytes at a time, where they fit."""
    sums = []
    for flat in [tensor.detach().reshape(-1) for tensor in tensors]:
        size = flat.element_size()
        fits = size < 8 and flat.nbytes % 8 == flat.storage_offset() * size % 8 == 0
        kind = torch.int64 if fits else {1: torch.int8, 2: torch.int16}.get(size, torch.int32)
        sums.append(flat.view(kind).sum(dtype=torch.int64).to(tensors[0].device))
    return torch.stack(sums)


class FollowedModule:
    """Look-ahead that a module's forward in training enters, and that is left by `leave`.

    So do a forward in evaluation or without gradients, and a `state_dict` or `load_state_dict` of the module, which are
    of the parameters that all ranks have in common. So does another optimizer's step, once a backward has been through
    the module: it may be a critic, which the actor's loss has entered.

    trains: whether the lookahead's optimizer still does.

    Attributes:
        ddp: DDP module amid whose forward the last one in training was, if it exchanges gradients without a hook.
        close: Follows the module no more.
    """

    def __init__(self, module: nn.Module, lookahead: ErrorLookahead, trains: Callable[[], Any]) -> None:
        self.ddp: DistributedDataParallel | None = None
        self._lookahead, self._trains, self._inside = lookahead, trains, cast(AbstractContextManager[None] | None, None)
        before, before_state = _Hook(self, FollowedModule.before_forward), _Hook(self, FollowedModule.leave)
        handles: list[Any] = [module.register_forward_pre_hook(before, prepend=True)]  # before those that make weights
        original: Any = getattr(module, "_orig_mod", None)  # of torch.compile, which others may evaluate
        if original is not None:
            in_eager = _Hook(self, FollowedModule.before_forward, compiles=False)
            handles += [original.register_forward_pre_hook(in_eager, prepend=True)]
        for part in cast(Any, module).modules():
            handles += [part.register_state_dict_pre_hook(before_state)]
            handles += [part.register_load_state_dict_pre_hook(before_state)]
        self.close = weakref.finalize(self, lambda: [handle.remove() for handle in handles])
        _watch_steps()

    @property
    def inside(self) -> bool:
        """Whether a forward has entered, and nothing has left since."""
        return self._inside is not None

    def before_forward(self, module: nn.Module, *_: Any) -> None:
        """Enters, or leaves where no gradients are to be made, or another optimizer has taken a step.

        Does neither while all is frozen and others learn, nor without gradients between a forward in training and its
        backward: a reference, which is of the loss of this step.
        """
        by_others = self.inside and self._lookahead.written(quickly=True)
        enters = module.training and torch.is_grad_enabled() and self._trains()
        refers = self.inside and module.training and not torch.is_grad_enabled() and self._lookahead.waits
        if by_others or not (enters or refers):
            self.leave()
            return
        if refers or not self._lookahead.learns:
            return
        self._lookahead.note_forward()
        self.ddp = _ddp_of_now()
        if not self._lookahead.now:
            self._inside = self._lookahead.for_gradients()
            self._inside.__enter__()
            _ENTERED.modules.add(self)

    def leave(self, *_: Any) -> None:
        """Leaves what a forward has entered. RuntimeError: a parameter was written to meanwhile, which is undone."""
        inside, self._inside = self._inside, None
        if inside is not None:
            _ENTERED.modules.discard(self)
            inside.__exit__(None, None, None)

    def after_other(self) -> None:
        """Leaves after another optimizer's step, unless a backward of the forward that entered may be yet to come."""
        if self.inside and self._lookahead.made:
            self.leave()


class _Entered(threading.local):
    """Followed modules that forwards of this thread have entered; another thread may have left them."""

    def __init__(self) -> None:
        self.modules = weakref.WeakSet[FollowedModule]()


_ENTERED = _Entered()


@functools.cache
def _watch_steps() -> None:
    """Sets one hook for good: torch goes through its hooks while ranks that are threads would come and go."""
    register_optimizer_step_post_hook(_after_step)


def _after_step(*_: Any) -> None:
    if _ENTERED.modules:
        torch.compiler.disable(_leave_entered)()  # type: ignore[no-untyped-call]


def _leave_entered() -> None:
    for followed in list(_ENTERED.modules):
        followed.after_other()


class _Hook:
    """Hook of a module that does not keep its owner alive; copies of it, and pickled ones, do nothing.

    compiles: whether it is called amid a compiled forward too.
    """

    def __init__(
        self, owner: FollowedModule | None = None, call: Callable[..., None] | None = None, *, compiles: bool = True
    ) -> None:
        self._owner, self._call, self._compiles = None if owner is None else weakref.ref(owner), call, compiles
        # Not as a decorator: torch imports its compiler for that, a second for whoever only imports this package.
        self._uncompiled = torch.compiler.disable(self._now)  # type: ignore[no-untyped-call]

    @property
    def owner(self) -> FollowedModule | None:
        """Owner, None once it is gone."""
        return None if self._owner is None else self._owner()

    def __call__(self, *given: Any) -> None:
        if self._compiles or not torch.compiler.is_compiling():
            self._uncompiled(*given)

    def _now(self, *given: Any) -> None:
        if (owner := self.owner) is not None and self._call is not None:
            self._call(owner, *given)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, ()


def _ddp_of_now() -> DistributedDataParallel | None:
    """Module whose forward this is amid, if it exchanges gradients by itself after it."""
    ddp = getattr(DistributedDataParallel, "_active_ddp_module", None)
    return ddp if ddp is not None and ddp.require_backward_grad_sync and not ddp._comm_hooks else None


def _nodes() -> int:
    """Number of autograd nodes that this thread has made; a forward under no_grad makes none."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
