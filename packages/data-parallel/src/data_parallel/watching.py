"""Watching a backward: hooks on parameters, which keep nothing alive, and the call that follows its end."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import Variable

T = TypeVar("T")


def watch(
    owner: T, parameters: Mapping[int, Tensor], told: Callable[[T, int], None], *, before: bool = False
) -> weakref.finalize[..., T]:
    """Calls `told`, a method of the owner's class, whenever autograd has added to a parameter's gradient.

    parameters: by the number that `told` gets. before: it is called before that, and by `torch.autograd.grad` too.

    Returns a function that removes the hooks, which is called when the owner is gone.
    """
    looked_up = weakref.ref(owner)

    def hook(member: int, _: Any) -> None:
        if (living := looked_up()) is not None:
            told(living, member)

    def remove() -> None:
        for handle in handles:
            handle.remove()

    register: Any = Tensor.register_hook if before else Tensor.register_post_accumulate_grad_hook
    handles = [register(p, partial(hook, member)) for member, p in parameters.items()]
    return weakref.finalize(owner, remove)


def at_the_end() -> Callable[[Callable[[], None]], None]:
    """Function that queues a callback for the end of the running backward; RuntimeError if this torch has none.

    It is private. FSDP2 and DDP use the same; public hooks are on tensors of the graph, which does not contain the
    sharded parameters.
    """
    engine: Any = getattr(Variable, "_execution_engine", None)
    queue: Callable[[Callable[[], None]], None] | None = getattr(engine, "queue_callback", None)
    if queue is None:
        raise RuntimeError(
            f"torch {torch.__version__} lacks Variable._execution_engine.queue_callback, which tells that backward has "
            "ended: take a version that has it, 2.6 to 2.13 do"
        )
    return queue
