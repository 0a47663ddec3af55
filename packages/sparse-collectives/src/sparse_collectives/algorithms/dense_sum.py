"""The dense sum as a sparse allreduce: the baseline, and what the others become at density 1."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from communicators import Schedule, schedules
from sparse_compress import SparseVector, topk

from sparse_collectives.algorithm import Algorithm, Array, Reduction, State, Traffic
from sparse_collectives.algorithms.reference import cut


@dataclass(frozen=True)
class Dense(Algorithm):
    """The exact sum, as a vector with all n entries; nothing is dropped, and k does not matter.

    Halving and doubling where P is a power of two, the ring elsewhere (Thakur et al., IJHPCA 2005): 2n(P − 1)/P
    elements either way. Where rounds count more than bytes, halving and doubling at any P below RING_NBYTES, and
    doubling alone while n log P is at most DOUBLING_NBYTES: ranks beyond the largest power of two fold into a partner
    first and get the sum last.
    """

    name = "dense"
    selects = False

    def schedule(
        self, sparse: SparseVector, rank: int, size: int, k: int, state: State | None = None
    ) -> Schedule[Reduction]:
        total = yield from schedules.allreduce(sparse.to_dense(), rank, size)
        nothing = SparseVector.empty(sparse.numel, sparse.dtype, device=sparse.device)
        return Reduction(topk(total, total.numel()), nothing)

    def sent(self, rank: int, size: int, k: int, numel: int, dtype: torch.dtype) -> Traffic:
        """Bytes of the sum, see `Traffic.allreduce`."""
        return Traffic.allreduce(numel * dtype.itemsize, rank, size, dtype.itemsize)

    def merged(self, rank: int, size: int, k: int, numel: int) -> int:
        """None: adding dense vectors costs next to nothing."""
        return 0

    def reference(self, inputs: Sequence[Array], k: int) -> Array:
        """The sum, in whatever order: for numbers whose sums are exact."""
        return np.asarray(np.sum([cut(x, k) for x in inputs], axis=0))
