"""Rules for what a sparse allreduce cuts on the way; those other than the package's own are the published ones."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from communicators import Schedule
from sparse_collectives import ALGORITHMS, Algorithm, Reduction
from sparse_compress import SparseVector

Rule = Callable[[SparseVector, Reduction], SparseVector]
"""(what this rank sent, what the exchange returned) -> what goes to its residual, besides what it did not select."""


def all_of_it(sent: SparseVector, reduction: Reduction) -> SparseVector:
    """Ours, SparDL's "global" (GRES): every part that was cut goes to exactly one rank."""
    del sent
    return reduction.dropped


def missing_from_the_result(sent: SparseVector, reduction: Reduction) -> SparseVector:
    """gTop-k's as published (Shi et al., ICDCS 2019, algorithm 4), SparDL's "partial" (PRES).

    A rank takes back what it sent at indices that the result has not; what was cut on the way at one that it has,
    because another rank's part survived, is lost.
    """
    gone = ~torch.isin(sent.indices, reduction.total.indices)
    return SparseVector(sent.indices[gone], sent.values[gone], sent.numel)


def nothing(sent: SparseVector, reduction: Reduction) -> SparseVector:
    """SparDL's "local" (LRES): a residual has only what the rank did not select."""
    del reduction
    return SparseVector.empty(sent.numel, sent.dtype, device=sent.device)


RULES: Mapping[str, Rule] = {"global": all_of_it, "partial": missing_from_the_result, "local": nothing}


def with_residuals(algorithm: str, rule: str) -> Algorithm:
    """One of the package's algorithms, with that rule in place of its own."""
    kind: Any = type(ALGORITHMS[algorithm])
    collect = RULES[rule]

    class WithResiduals(kind):  # type: ignore[misc]
        name = f"{algorithm}, {rule} residuals"

        def schedule(
            self, sparse: SparseVector, rank: int, size: int, k: int, state: Any = None
        ) -> Schedule[Reduction]:
            reduction = yield from super().schedule(sparse, rank, size, k, state)
            return Reduction(reduction.total, collect(sparse, reduction))

    return WithResiduals()
