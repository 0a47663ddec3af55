"""The k largest of all that ranks have accumulated: with dense bytes, what no sum of k entries can choose better."""

from dataclasses import dataclass

import torch
from communicators import Schedule, schedules
from sparse_collectives import ALGORITHMS, Algorithm, Reduction, Traffic
from sparse_compress import Largest, SparseVector, topk, vectors
from torch import Tensor


@dataclass(frozen=True)
class LargestOfTheSum(Algorithm):
    """Sums everything, and takes the k largest of the sum, on all ranks alike; the rest waits where it is.

    It tells how much of what a sparse exchange loses comes from its choice of entries, and how much from their number.
    """

    name = "largest-of-the-sum"
    cuts = False

    def select(self, like: Tensor, rank: int, size: int, k: int, state: object) -> Largest:
        """All of it."""
        return Largest(like.numel())

    def schedule(self, sparse: SparseVector, rank: int, size: int, k: int, state: object = None) -> Schedule[Reduction]:
        total = yield from schedules.allreduce(sparse.to_dense(), rank, size)
        largest = topk(total, k)
        return Reduction(largest, vectors.without(sparse, largest), size)

    def sent(self, rank: int, size: int, k: int, numel: int, dtype: torch.dtype) -> Traffic:
        return ALGORITHMS["dense"].sent(rank, size, numel, numel, dtype)
