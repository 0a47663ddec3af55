"""Hooks on parameters that hold who is told only weakly: they keep nothing alive, and go with it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

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
