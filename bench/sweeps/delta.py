"""How far a sparse sum is from the whole one, beside random selection: δ of the assumption behind gTop-k's convergence.

    δ = ‖s − kept‖² / E‖s − RandK(s)‖²,  s = Σ over ranks of what has accumulated,  E‖s − RandK(s)‖² = (1 − k/n)·‖s‖²

The assumption (Shi et al., IJCAI 2019) is δ ≤ 1, at every step. What is kept: by "top-k of the sum" the k largest of s,
which no exchange can do without s; by "sum of top-k" every rank's own k largest, added; by "gtopk" what our gTop-k
returns, cut at every merge.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from communicators import Schedule
from sparse_collectives import GTopK, Reduction
from sparse_compress import SparseVector, topk
from torch import Tensor

EVERY = 12
"""Steps from one observation to the next."""
KEPT = ("gtopk", "sum of top-k", "top-k of the sum")


class Observed:
    """gTop-k as it is, of one training whose ranks are simulated; remembers what some steps were given and returned."""

    def __init__(self) -> None:
        self._steps: dict[int, int] = defaultdict(int)  # by rank: begun
        self._accumulated: dict[int, dict[int, Tensor]] = defaultdict(dict)  # by step, by rank
        self._totals: dict[int, Tensor] = {}
        self._k = 0
        self.algorithm = ObservedGTopK(observed=self)

    def points(self) -> list[dict[str, Any]]:
        """One an observed step: step, and δ by what is kept."""
        found = []
        for step, by_rank in sorted(self._accumulated.items()):
            parts = [by_rank[rank] for rank in sorted(by_rank)]
            found.append({"step": step, **deltas(parts, self._k, self._totals[step])})
        return found

    def select(self, rank: int, k: int) -> Callable[[Tensor], SparseVector]:
        """The k largest, remembered now and then."""

        def largest(accumulated: Tensor) -> SparseVector:
            self._steps[rank] += 1
            if (self._steps[rank] - 1) % EVERY == 0:
                self._accumulated[self._steps[rank]][rank] = accumulated.clone()
            return topk(accumulated, k)

        return largest

    def returned(self, reduction: Reduction, step: int, k: int) -> None:
        """The total of a step, of which some are remembered."""
        if (step - 1) % EVERY == 0:
            self._totals[step], self._k = reduction.total.to_dense(), k

    def step_of(self, rank: int) -> int:
        """Steps that a rank has begun."""
        return self._steps[rank]


@dataclass(frozen=True)
class ObservedGTopK(GTopK):
    """gTop-k, which says what it is given and returns."""

    name = "gtopk, observed"
    takes_wire = False
    observed: Any = None

    def select(self, like: Tensor, rank: int, size: int, k: int, state: Any) -> Any:
        return self.observed.select(rank, k)

    def schedule(self, sparse: SparseVector, rank: int, size: int, k: int, state: Any = None) -> Schedule[Reduction]:
        step = self.observed.step_of(rank)
        reduction = yield from super().schedule(sparse, rank, size, k)
        if rank == 0:
            self.observed.returned(reduction, step, k)
        return reduction


def deltas(parts: list[Tensor], k: int, gtopk_total: Tensor) -> dict[str, float]:
    """δ by what is kept (`KEPT`). parts: what has accumulated, by rank, 1-D."""
    whole = sum(part.double() for part in parts)
    assert isinstance(whole, Tensor)
    expected = (1 - k / len(whole)) * float(whole.square().sum())
    chosen = sum(topk(part, k).to_dense().double() for part in parts)
    kept = (gtopk_total.double(), chosen, topk(whole, k).to_dense())
    return {name: float((whole - each).square().sum()) / expected for name, each in zip(KEPT, kept, strict=True)}
