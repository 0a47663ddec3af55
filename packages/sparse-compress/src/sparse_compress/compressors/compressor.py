"""Interfaces of compressors."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from sparse_compress.accumulator import Accumulator
from sparse_compress.arguments import share_of
from sparse_compress.vector import SparseVector

SHARE = "the fraction of elements to send"


@runtime_checkable
class Compressor(Protocol):
    """Chooses the entries of a tensor to send: any callable with ``entries``; CONTRIBUTING says how to add one.

    One that always takes the largest magnitudes first declares so by an attribute ``finds_nonfinite = True``: NaN and
    inf are then looked for in what it sends. One that returns other values than the tensor's has ``unbiased = True``.
    """

    def __call__(self, tensor: Tensor) -> SparseVector:
        """Entries chosen from ``tensor`` flattened, with their values; at most ``entries(tensor.numel())``.

        Not empty, unless the tensor is or all of it is zero.
        """

    def entries(self, numel: int) -> int:
        """Bound k on the entries that a tensor of ``numel`` elements gives, alike on every rank.

        It bounds the capacity of every receive.

        Args:
            numel: Elements of the tensor.
        """


@runtime_checkable
class StatefulCompressor(Protocol):
    """Compressor that keeps state for each name between calls; error feedback saves it and rolls it back."""

    def __call__(self, tensor: Tensor, *, name: str = "") -> SparseVector:
        """Chosen entries, like ``Compressor``; tensors of different names do not affect each other."""

    def entries(self, numel: int) -> int:
        """Bound k on the entries, like ``Compressor.entries``."""

    def state_dict(self) -> dict[str, Any]:
        """State as plain numbers, in memory of their own."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where ``state`` was saved.

        Args:
            state: Result of ``state_dict``.

        Raises:
            ValueError: It is no such state; nothing is changed.
        """


@runtime_checkable
class FusedCompressor(Compressor, Protocol):
    """Compressor that selects while error feedback accumulates, in fewer sweeps over memory than two steps take."""

    def step(self, before: Accumulator, gradient: Tensor, momentum: float, out: Accumulator) -> SparseVector:
        """Fuses ``before.advance(gradient, momentum, out)``, a call on ``out.residual``, ``out.clear``, bit for bit.

        Args:
            before: State accumulated until now.
            gradient: Dense, of any shape; left as it is.
            momentum: m of the correction, 0 without.
            out: Accumulator for the new state, without the entries that are sent; may be ``before``.

        Returns:
            The entries to send.
        """


class Density:
    """Density with k = max(1, round(density · n)), 0 only for an empty tensor.

    ``density``: 0 < density ≤ 1, else ValueError; TypeError for anything but a number. It may be set anew.
    """

    def __init__(self, density: float) -> None:
        self.density = density

    @property
    def density(self) -> float:
        """Fraction of elements to send."""
        return self._density

    @density.setter
    def density(self, density: float) -> None:
        self._density = share_of(density, "density", expected=SHARE)

    def entries(self, numel: int) -> int:
        """Bound k on the entries that are sent of ``numel`` elements, alike on every rank."""
        return min(numel, max(1, round(self.density * numel)))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(density={self.density})"
