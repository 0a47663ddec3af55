"""ARC-Top-k: ranks agree on rows by the sum of their sketches, and sum these rows; no index travels."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from communicators import Schedule, schedules
from sparse_compress import Largest, SparseVector, topk, vectors
from torch import Tensor

from sparse_collectives.algorithm import Algorithm, Array, Reduction, State, Traffic, check_values, is_count


@dataclass(frozen=True)
class ARCTopK(Algorithm):
    """The rows of the sum that a sketch of it finds largest, at most k entries (Chen et al., arXiv 2510.26709).

        rows     all elements in rows of `width`; a call with k below it takes rows of k elements
        sketch   of each row one number, its product with random signs that are the same on all ranks; summed
        choice   the ⌊k / width⌋ rows whose sum is the largest, alike on all ranks
        sum      of these rows; those of all others are dropped

    Both sums are dense ones, so that bytes of large vectors grow with P as little as those of a dense sum. The signs
    are new in every call of a state.
    Differs from the paper: rows are parts of a vector, not of a matrix, and have one number each, not four, since they
    are shorter; signs take the place of normal numbers, so that sketches of integers are exact.
    It takes all that has accumulated, not a selection. It is a baseline, which learns worse than others do for its
    bytes: no name stands for it, and neither "auto" nor `advise` takes it.

    Args:
        width: Elements of a row.
        wire: The plain one; values travel as they are.
    """

    name = "arc-topk"
    cuts = False
    width: int = 64

    def check(self, size: int) -> None:
        """A row has 1 element or more."""
        if self.width < 1:
            raise ValueError(f"width is {self.width}, expected 1 element of a row or more")

    def schedule(
        self, sparse: SparseVector, rank: int, size: int, k: int, state: State | None = None
    ) -> Schedule[Reduction]:
        state, dense, numel = self.initial_state() if state is None else state, sparse.to_dense(), sparse.numel
        if k < numel:
            rows = self._rows(dense, k)
            sketch = yield from schedules.allreduce(_sketch(rows, state["step"], size), rank, size)
            known = torch.where(sketch.isfinite(), sketch, torch.inf)  # unlike devices make unlike NaNs of a sum
            chosen, width = topk(known, k // rows.shape[1]).indices.long(), rows.shape[1]
            sums = yield from schedules.allreduce(rows[chosen].view(-1), rank, size)
            indices = (chosen[:, None] * width + torch.arange(width, device=rows.device)).view(-1)
            within = indices < numel  # not what fills up the last row
            total = vectors.of_entries(indices[within].int(), sums[within], numel)
        else:
            total = topk((yield from schedules.allreduce(dense, rank, size)), numel)
        state["step"] += 1
        return Reduction(total, vectors.without(sparse, total))

    def select(self, like: Tensor, rank: int, size: int, k: int, state: State | None) -> Largest:
        """All of it."""
        return Largest(like.numel())

    def initial_state(self) -> State:
        """The state before the first call; step: calls so far, which the signs are drawn by."""
        return {"step": 0}

    def check_state(self, state: State) -> None:
        check_values(state, {"step": is_count})

    def sent(self, rank: int, size: int, k: int, numel: int, dtype: torch.dtype) -> Traffic:
        """Two dense sums, of a number for each row and of the rows that are chosen, or one of all that there is."""
        width = max(1, min(self.width, k))
        sums = [-(-numel // width), k // width * width] if k < numel else [numel]
        return Traffic.total(*(Traffic.allreduce(n * dtype.itemsize, rank, size, dtype.itemsize) for n in sums))

    def merged(self, rank: int, size: int, k: int, numel: int) -> int:
        """None: adding dense vectors costs next to nothing."""
        return 0

    def reference(self, inputs: Sequence[Array], k: int) -> Array:
        """The rows of the sum, added in whatever order: for numbers whose sums are exact."""
        total = np.asarray(np.sum(inputs, axis=0))
        if k >= len(total):
            return total
        rows = self._rows(torch.from_numpy(total), k)
        sketch = _sketch(rows, 0, len(inputs)).numpy()
        chosen = np.argsort(-np.abs(sketch), kind="stable")[: k // rows.shape[1]]
        return np.where(np.isin(np.arange(len(total)) // rows.shape[1], chosen), total, np.zeros_like(total))

    def _rows(self, dense: Tensor, k: int) -> Tensor:
        """All elements in rows, the last one filled up with zeros."""
        width = min(self.width, k)
        return torch.nn.functional.pad(dense, (0, -len(dense) % width)).view(-1, width)


def _sketch(rows: Tensor, call: int, size: int) -> Tensor:
    """Product of each row with random signs, times a power of two so small that no sum of finite numbers overflows."""
    generator, width = torch.Generator().manual_seed(call), rows.shape[1]
    signs = 2.0 * torch.randint(2, (width,), generator=generator, device="cpu") - 1
    with torch.autocast(rows.device.type, enabled=False):  # it would multiply in half precision
        return rows @ (signs / (1 << (width * size).bit_length())).to(rows.device, rows.dtype)
