"""Interface of a language model to the task that trains it."""

from typing import Protocol

from torch import Tensor

State = tuple[Tensor, ...]
"""What a model carries from one window of a stream to the next, each [layers, streams, …]; () for nothing."""


class Language(Protocol):
    """A module: tokens int64 [n, streams] and a state -> logits [n, streams, words] and the state after them."""

    def begin(self, streams: int) -> State:
        """The state at the beginning of so many streams."""
