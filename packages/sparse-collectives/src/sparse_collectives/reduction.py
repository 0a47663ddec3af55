"""What a sparse allreduce returns."""

from __future__ import annotations

from dataclasses import dataclass

from sparse_compress import SparseVector


@dataclass(frozen=True, slots=True)
class Reduction:
    """What a sparse allreduce returns. Over all ranks, inputs = total + what was dropped, so nothing is lost.

    Attributes:
        total: The agreed sum, the same bits on every rank.
        dropped: What this rank must add to its residual, in units of the sum; another vector on every rank.
    """

    total: SparseVector
    dropped: SparseVector
