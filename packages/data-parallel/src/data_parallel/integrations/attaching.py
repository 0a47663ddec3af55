"""The exchange on a module that a framework has wrapped in DistributedDataParallel; one way of two."""

from collections.abc import Iterable, Mapping
from typing import Any, cast
from weakref import WeakKeyDictionary

from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel

from data_parallel.ddp.hook import SparseHookState, sparse_hook
from data_parallel.optimizer import DistributedOptimizer, ExchangingOptimizer
from data_parallel.update_optimizer import UpdateOptimizer

_EXCHANGED_BY: WeakKeyDictionary[nn.Module, tuple[Any, ...]] = WeakKeyDictionary()
"""Hook's state, settings and scaler by DDP module, () where optimizers exchange. DDP takes a hook only once."""


def hooked(
    model: Any, optimizers: Iterable[Any], settings: Mapping[str, Any], *, grad_scaler: Any, how: str
) -> SparseHookState:
    """The hook, with the module's own names and group; see `SparseHookState` for the settings.

    how: what the user writes so that the framework wraps the module in DDP, in which a further training with the same
    settings finds the state of the first.

    Raises TypeError for a module without DDP or with another exchange, and where an optimizer exchanges too.
    """
    ddp = _ddp_of(model, how)
    if any(isinstance(inner_of(optimizer), ExchangingOptimizer) for optimizer in optimizers):
        raise TypeError(
            "a DistributedOptimizer, or UpdateOptimizer, exchanges by itself: take DistributedOptimizers in place of "
            "SparseGradients, or the hook with a plain optimizer"
        )
    if ddp in _EXCHANGED_BY:
        first, *known = _EXCHANGED_BY[ddp] or (None,)
        if known != [dict(settings), grad_scaler]:
            raise TypeError("this DDP module has an exchange with other settings already: wrap the model anew")
        return cast(SparseHookState, first)
    state = SparseHookState(ddp.process_group, grad_scaler=grad_scaler, named_parameters=ddp, **settings)
    ddp.register_comm_hook(state, sparse_hook)
    _EXCHANGED_BY[ddp] = state, dict(settings), grad_scaler
    return state


def left_to_optimizers(model: Any, optimizers: Iterable[Any], *, how: str) -> None:
    """Stops DDP from exchanging gradients, because these optimizers do.

    A single `UpdateOptimizer` follows the module's forward, as after `for_model`.

    Raises TypeError for a module without DDP, and unless all do.
    """
    ddp, found = _ddp_of(model, how), [inner_of(optimizer) for optimizer in optimizers]
    if not found or not all(isinstance(optimizer, ExchangingOptimizer) for optimizer in found):
        kinds = [type(optimizer).__name__ for optimizer in found]
        raise TypeError(
            f"the optimizers are {kinds}, expected DistributedOptimizer or UpdateOptimizer for each: DDP leaves the "
            "exchange to them"
        )
    if any(isinstance(optimizer, DistributedOptimizer) and optimizer.overlap for optimizer in found):
        raise TypeError(
            "a DistributedOptimizer with overlap=True sends gradients in backward, at whose end DDP, though it "
            "exchanges nothing, puts its own copies in their place: take overlap=False, or SparseGradients"
        )
    if _EXCHANGED_BY.get(ddp):
        raise TypeError("this DDP module has a sparse hook already, and would exchange twice: wrap the model anew")
    if ddp not in _EXCHANGED_BY:
        ddp.register_comm_hook(None, noop_hook)
        _EXCHANGED_BY[ddp] = ()
    if len(found) == 1 and isinstance(found[0], UpdateOptimizer):
        found[0].follow(ddp.module)


def leave(optimizers: Iterable[Any]) -> None:
    """Ends `ahead` where the forward of a followed module has entered it."""
    for optimizer in map(inner_of, optimizers):
        if isinstance(optimizer, UpdateOptimizer):
            optimizer.leave_ahead()


def inner_of(optimizer: Any) -> Any:
    """Unwraps an optimizer that a framework has wrapped."""
    return optimizer if isinstance(optimizer, ExchangingOptimizer) else getattr(optimizer, "optimizer", optimizer)


def _ddp_of(model: Any, how: str) -> DistributedDataParallel:
    model = getattr(model, "_orig_mod", model)  # torch.compile's
    if not isinstance(model, DistributedDataParallel):
        what = type(model).__name__ if isinstance(model, nn.Module) else repr(model)
        raise TypeError(f"the model is {what}, expected DistributedDataParallel around it: {how}")
    return model
