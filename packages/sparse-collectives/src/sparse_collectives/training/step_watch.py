"""Objects that look at the steps of every optimizer, because nobody tells them which one holds their parameters.

torch goes through its hooks while it calls them, so that none may be taken out in a step, nor whenever the garbage of
one is found: there is a single hook, and it stays.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Protocol
from weakref import WeakSet

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook


class Watcher(Protocol):
    """Is not kept alive by being one."""

    def look(self, optimizer: Optimizer) -> None:
        """At an optimizer that has stepped."""


_WATCHERS: WeakSet[Watcher] = WeakSet()


def watch(watcher: Watcher) -> None:
    """From now on it looks, until `unwatch` or it is gone."""
    _hooked()
    _WATCHERS.add(watcher)


def unwatch(watcher: Watcher) -> None:
    """It looks no longer."""
    _WATCHERS.discard(watcher)


@cache
def _hooked() -> Any:
    return register_optimizer_step_post_hook(_stepped)


def _stepped(optimizer: Optimizer, *given: Any) -> None:
    del given
    for watcher in list(_WATCHERS):
        watcher.look(optimizer)
