"""The sparse allreduces by name. A new one is its own file and one line here; the laws then test it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from communicators.schedule import Schedule
from sparse_compress import SparseVector

from sparse_collectives.dense import dense, dense_sent
from sparse_collectives.gtopk import gtopk, gtopk_merged, gtopk_sent
from sparse_collectives.reduction import Reduction
from sparse_collectives.topk_allgather import topk_allgather, topk_allgather_merged, topk_allgather_sent
from sparse_collectives.traffic import Traffic

State: TypeAlias = dict[str, Any]
"""What an algorithm keeps between calls: plain values and tensors, changed in place and only on success."""


@dataclass(frozen=True, slots=True)
class Algorithm:
    """What the rest of the package asks of an algorithm.

    schedule: (sparse, rank, size, k, *, cost=None) -> Schedule[Reduction], with sparse of exactly min(k, n) entries;
        one that has `initial_state` takes `state=` too.
    sent: (rank, size, k, numel, dtype) -> Traffic, the exact expression.
    merged: (rank, size, k, numel) -> entries that the rank merges, as `schedule` tells its `cost`.
    select: where the algorithm prescribes what is sent, (acc, rank, size, k, state) -> SparseVector; acc is 1-D.
    initial_state: the state before the first call, where there is one.
    compresses: whether a gradient is selected from before it is sent, and so leaves a residual.
    """

    schedule: Callable[..., Schedule[Reduction]]
    sent: Callable[[int, int, int, int, torch.dtype], Traffic]
    select: Callable[[torch.Tensor, int, int, int, State | None], SparseVector] | None = None
    initial_state: Callable[[], State] | None = None
    compresses: bool = True
    merged: Callable[[int, int, int, int], int] | None = None


ALGORITHMS: dict[str, Algorithm] = {
    "dense": Algorithm(dense, dense_sent, compresses=False),
    "topk-allgather": Algorithm(topk_allgather, topk_allgather_sent, merged=topk_allgather_merged),
    "gtopk": Algorithm(gtopk, gtopk_sent, merged=gtopk_merged),
}


def algorithm_named(name: str) -> Algorithm:
    """The algorithm of that name; ValueError that lists the known ones."""
    if name not in ALGORITHMS:
        raise ValueError(f"unknown algorithm {name!r}; known: {', '.join(ALGORITHMS)}")
    return ALGORITHMS[name]
