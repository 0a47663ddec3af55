"""Choice of compression: bits, or a compressor and its sum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from communicators import Communicator

from local_sgd.compression.sparsifier import Allreduce, Compress, Sparsifier
from local_sgd.compression.sums import CompressedSum, RoundedSum, SparseSum
from local_sgd.parts import Part

BITS = {"int8": 8, "int4": 4}


@dataclass(frozen=True)
class Compression:
    """Compression that a user asked for.

    compress: "int8", "int4", a `Sparsifier`, which takes an allreduce, or None: nothing is compressed.

    Raises:
        TypeError: `compress` is of another type, or a compressor without an allreduce.
        ValueError: `compress` is another word, or there is an allreduce but no compressor.
    """

    compress: Compress = None
    allreduce: Allreduce | None = None

    def __post_init__(self) -> None:
        known = self.compress is None or self.compress in BITS if _plain(self.compress) else False
        if not known and not isinstance(self.compress, Sparsifier):
            raise (ValueError if _plain(self.compress) else TypeError)(
                f"compress is {self.compress!r}, expected None, one of {tuple(BITS)}, or a compressor with error "
                "feedback: compress(name, delta), restore(name, dropped), state_dict() and load_state_dict()"
            )
        if known and self.allreduce is not None:
            raise ValueError(f"allreduce sums what a compressor sends, but compress is {self.compress!r}: leave it out")
        if not known and not callable(self.allreduce):
            raise TypeError(
                f"allreduce is {self.allreduce!r}, but compress is a compressor: give the sum of what it sends, "
                "allreduce(sent, comm), which returns .total and .dropped"
            )

    def __bool__(self) -> bool:
        return self.compress is not None

    def __repr__(self) -> str:
        """Text that is the same on every rank."""
        return str(self.compress) if _plain(self.compress) else type(self.compress).__name__

    def sum_of(self, parts: Sequence[Part], comm: Communicator, what: str) -> CompressedSum:
        """Compressed sum of these parts over ranks."""
        if isinstance(self.compress, str):
            return RoundedSum(parts, BITS[self.compress], comm, what)
        assert isinstance(self.compress, Sparsifier)
        assert self.allreduce is not None
        return SparseSum(parts, self.compress, self.allreduce, comm)


def _plain(compress: object) -> bool:
    return compress is None or isinstance(compress, str)
