"""What a compressor is."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from sparse_compress.accumulator import Accumulator
from sparse_compress.arguments import share_of
from sparse_compress.vector import SparseVector

SHARE = "the fraction of elements to send"


@runtime_checkable
class Compressor(Protocol):
    """Chooses the entries of a tensor to send: any callable with ``entries``; see CONTRIBUTING for one of one's own.

    One that always takes the largest magnitudes first says so by an attribute ``finds_nonfinite = True``: NaN and
    inf are then looked for in what it sends. One that returns other values than the tensor's has ``unbiased = True``.
    """

    def __call__(self, tensor: Tensor) -> SparseVector:
        """Chosen entries of ``tensor`` flattened, with their values; at most ``entries(tensor.numel())``.

        Not empty, unless the tensor is or all of it is zero.
        """

    def entries(self, numel: int) -> int:
        """k: the most entries that a tensor of ``numel`` elements gives, alike on every rank.

        It bounds the capacity of every receive.

        Args:
            numel: Elements of the tensor.
        """


@runtime_checkable
class StatefulCompressor(Protocol):
    """A compressor that keeps something for each name between calls; error feedback saves it and rolls it back."""

    def __call__(self, tensor: Tensor, *, name: str = "") -> SparseVector:
        """As ``Compressor``; tensors of different names know nothing of each other."""

    def entries(self, numel: int) -> int:
        """As ``Compressor``."""

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, in memory of their own."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was saved.

        Args:
            state: What ``state_dict`` gave.

        Raises:
            ValueError: It is no such state; nothing is changed.
        """


@runtime_checkable
class FusedCompressor(Compressor, Protocol):
    """A compressor that selects while error feedback accumulates, in fewer sweeps over memory than two steps take."""

    def step(self, before: Accumulator, gradient: Tensor, momentum: float, out: Accumulator) -> SparseVector:
        """The same bits as ``before.advance(gradient, momentum, out)``, a call on ``out.residual``, ``out.clear``.

        Args:
            before: What has accumulated until now.
            gradient: Dense, of any shape; left as it is.
            momentum: m of the correction, 0 without.
            out: Where what has accumulated now is written, without what is sent; may be ``before``.

        Returns:
            What is to be sent.
        """


class Density:
    """k = max(1, round(density · n)), 0 only for an empty tensor. ``density``: 0 < density ≤ 1, else ValueError.

    It may be set anew; TypeError for what is no number.
    """

    def __init__(self, density: float) -> None:
        self.density = density

    @property
    def density(self) -> float:
        """The fraction of elements to send."""
        return self._density

    @density.setter
    def density(self, density: float) -> None:
        self._density = share_of(density, "density", expected=SHARE)

    def entries(self, numel: int) -> int:
        """k: the most entries that are sent of ``numel`` elements, alike on every rank."""
        return min(numel, max(1, round(self.density * numel)))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(density={self.density})"
