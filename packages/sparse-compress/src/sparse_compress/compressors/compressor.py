"""Interfaces of compressors."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from sparse_compress.vector import SparseVector


@runtime_checkable
class Compressor(Protocol):
    """Chooses the entries of a tensor to send: any callable with ``entries``.

    ``sparse_compress.testing.check_compressor_laws`` tests one of your own.

    One that always takes the largest magnitudes first declares so by an attribute ``finds_nonfinite = True``: NaN and
    inf are then looked for in what it sends. One that scales values for the right mean has ``unbiased = True``.
    One with a ``step``, as a `Selection` with a ``plan`` has, selects while error feedback accumulates, in fewer sweeps
    over memory.
    """

    def __call__(self, tensor: Tensor) -> SparseVector:
        """Entries chosen from ``tensor`` flattened, which stays as it is; at most ``entries(tensor.numel())``.

        With their values, or others s that leave less of the tensor x, as signs with a scale: ‖x − s‖ < ‖x‖. Not empty,
        unless the tensor is or all of it is zero.
        """

    def entries(self, numel: int) -> int:
        """Bound k on the entries that a tensor of ``numel`` elements gives, alike on every rank; ≥ 1 unless empty.

        k ≤ ``numel``, which may be 0. It bounds the capacity of every receive.

        Args:
            numel: Elements of the tensor.
        """


@runtime_checkable
class StatefulCompressor(Compressor, Protocol):
    """Compressor that keeps state for each name between calls; error feedback saves it and rolls it back.

    Each rank has one of its own: where ranks share a process, as in a SimulatedWorld, make it in the rank's function.
    """

    def __call__(self, tensor: Tensor, *, name: str = "") -> SparseVector:
        """Chosen entries, like ``Compressor``; tensors of different names do not affect each other."""

    def state_dict(self) -> dict[str, Any]:
        """State as plain numbers, in memory of their own."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where ``state`` was saved.

        Args:
            state: Result of ``state_dict``.
        """
