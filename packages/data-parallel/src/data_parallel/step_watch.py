"""Objects that watch the steps of every optimizer, because they are not told which one holds their parameters.

torch iterates over its hooks while it calls them, so no hook may be removed during a step, or whenever one is
garbage-collected: there is a single hook, and it stays.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Protocol
from weakref import WeakSet

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook


class Watcher(Protocol):
    """Object that is told of optimizers' steps, by weak reference: watching does not keep it alive."""

    def look(self, optimizer: Optimizer) -> None:
        """Checks an optimizer that has stepped."""


_WATCHERS: WeakSet[Watcher] = WeakSet()


def watch(watcher: Watcher) -> None:
    """Starts telling the watcher of steps, until `unwatch` or its end."""
    _hooked()
    _WATCHERS.add(watcher)


def unwatch(watcher: Watcher) -> None:
    """Stops telling the watcher of steps."""
    _WATCHERS.discard(watcher)


@cache
def _hooked() -> Any:
    return register_optimizer_step_post_hook(_stepped)


def _stepped(optimizer: Optimizer, *given: Any) -> None:
    del given
    for watcher in list(_WATCHERS):
        watcher.look(optimizer)
