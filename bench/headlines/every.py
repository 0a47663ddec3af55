"""All headlines, in the order of the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bench.headlines import kernels, own, papers
from bench.headlines.headline import Headline

HEADLINES: Sequence[tuple[str, str, Callable[[Any], Headline]]] = (
    ("scaling", "rows", papers.gtopk_over_dense),
    ("scaling", "rows", papers.gtopk_over_topk),
    ("demo", "rows", papers.gtopk_accuracy),
    ("scaling", "rows", papers.spardl_over_sparse),
    ("collectives", "rows", papers.oktopk_volume),
    ("local-sgd", "rows", papers.overlap_overhead),
    ("eager", "rows", papers.eager_speedup),
    ("eager", "ranks", papers.eager_on_ranks),
    ("partial", "rows", own.late_rank),
    ("overlap", "rows", own.overlap_hides),
    ("predictions", "rows", own.slow_link_predictions),
    ("predictions", "many", own.many_ranks),
    ("slow-link", "rows", own.link_as_modelled),
    ("compress", "rows", own.selection),
    ("compress", "rows", kernels.topk),
    ("compress", "levels", kernels.steps),
    ("compress", "levels", kernels.merge),
    ("collectives", "rows", kernels.calls),
)
"""Each with the record that it is made of, and the part of it."""
