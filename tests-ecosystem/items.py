"""What is tried of a framework: what it is called, and what came of it; the lines a user adds are in its code."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

MARK = "  # ours"


@dataclass(frozen=True)
class Item:
    """framework, what: for the table. result: what the function makes sure of."""

    framework: str
    what: str
    result: str
    run: Any

    @property
    def name(self):
        return self.run.__name__

    @property
    def lines(self):
        """Those that a user writes, without the arguments that only tests need."""
        source = inspect.getsource(self.run).splitlines()
        added = [line.removesuffix(MARK).strip() for line in source if line.endswith(MARK)]
        settings = {"**SETTINGS": "density=0.05, momentum=0.9", "**UPDATES": "steps=48, density=0.05"}
        for name, shown in settings.items():
            added = [line.replace(name, shown) for line in added]
        return added


def collector(framework, items):
    """A decorator that puts a function among the items."""

    def item(what, result):
        def add(function):
            items.append(Item(framework, what, result, function))
            return function

        return add

    return item
