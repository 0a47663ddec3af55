"""What a compressor is."""

from typing import Protocol, runtime_checkable

from torch import Tensor

from sparse_compress.accumulator import Accumulator
from sparse_compress.vector import SparseVector


@runtime_checkable
class Compressor(Protocol):
    """Chooses the entries of a tensor to send; a new one is one file in this folder."""

    def __call__(self, tensor: Tensor) -> SparseVector:
        """Chosen entries of ``tensor`` flattened, with their values; at most ``entries(tensor.numel())``."""

    def entries(self, numel: int) -> int:
        """k: the most entries that a tensor of ``numel`` elements gives, alike on every rank.

        It bounds the capacity of every receive.
        """


@runtime_checkable
class FusedCompressor(Compressor, Protocol):
    """A compressor that selects while error feedback accumulates, in fewer sweeps over memory than two steps take."""

    def step(self, before: Accumulator, gradient: Tensor, momentum: float, out: Accumulator) -> SparseVector:
        """The same bits as ``before.advance(gradient, momentum, out)``, a call on ``out.residual``, ``out.clear``."""
