"""One fragment of a model: its vectors, its exchange, its outer optimizer, and its position between two launches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from local_sgd.averaging import Arrived, Averaging
from local_sgd.outer import Outer
from local_sgd.parts import Part


@dataclass
class Fragment:
    """Fragment of a model, exchanged by itself.

    done, weight: steps since its last launch, and the sum of their weights.
    due: number of steps until the launched mean is applied; None where nothing is launched.
    """

    parts: list[Part]
    averaging: Averaging
    outer: Outer
    done: int = 0
    weight: float = 0.0
    due: int | None = None

    @property
    def names(self) -> list[str]:
        """Names of its parameters."""
        return [name for part in self.parts for name in part.names]

    def count(self, weight: float) -> None:
        """Counts one step."""
        self.done += 1
        self.weight += weight

    def launch(self, weight: float, due: int, *, finished: bool) -> None:
        """Launches the exchange of x as it is now."""
        self.averaging.launch([part.gather() for part in self.parts], weight, finished=finished)
        self.done, self.weight, self.due = 0, 0.0, due

    def state_dict(self) -> dict[str, Any]:
        """State of the fragment: a launched mean is waited for, not applied; without a launch means are zeros."""
        arrived = Arrived([], 0.0, 0) if self.due is None else self.averaging.arrived()
        means = arrived.means or [torch.zeros_like(part["anchor"]) for part in self.parts]
        return {
            "names": self.names,
            "done": self.done,
            "weight": self.weight,
            "launched": self.due is not None,
            "due": self.due or 0,
            "arrived": {"means": self._by_name(means), "weight": arrived.weight, "unfinished": arrived.unfinished},
            "outer": self.outer.state_dict(),
        }

    def check(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError for a state that does not fit; changes nothing."""
        if sorted(state["names"]) != sorted(self.names):
            raise ValueError(f"the state is of a fragment of {state['names']}, this one is of {self.names}")
        saved = {name: tuple(mean.shape) for name, mean in state["arrived"]["means"].items()}
        own = {name: tuple(view.shape) for name, view in self._by_name([p["anchor"] for p in self.parts]).items()}
        if wrong := sorted(set(saved.items()) ^ set(own.items())):
            raise ValueError(f"arrived: only the checkpoint, or only the model, has (name, shape) {wrong}")
        self.outer.check(state["outer"])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state that `check` accepted."""
        arrived, means = state["arrived"], [torch.empty_like(part["anchor"]) for part in self.parts]
        for name, view in self._by_name(means).items():
            view.copy_(arrived["means"][name])
        self.averaging.store(Arrived(means if arrived["weight"] else [], arrived["weight"], arrived["unfinished"]))
        self.done, self.weight = state["done"], state["weight"]
        self.due = state["due"] if state["launched"] else None
        self.outer.load_state_dict(state["outer"])

    def _by_name(self, flats: list[Tensor]) -> dict[str, Tensor]:
        pairs = zip(self.parts, flats, strict=True)
        return {name: view for part, flat in pairs for name, view in part.by_name(flat).items()}
