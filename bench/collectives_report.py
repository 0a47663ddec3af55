"""The rows of `bench collectives`: ratios to the dense allreduces, to the link, and to the expressions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from communicators import Communicator, Link
from sparse_collectives import ALGORITHMS
from sparse_collectives.prediction.plain_table import table

from bench.collectives_calls import Times

PARTS = ("select", "prepare", "merge", "exchange", "restore", "put")
LABELS = ("algorithm", "P", "n", "density")
COLUMNS = (
    *LABELS,
    *(f"{part}_ms" for part in (*PARTS, "whole")),
    *("x_mpi", "x_mpi_least", "x_gloo", "x_link"),
)
BF16 = "dense in bf16"
COUNTS = ("sent", "expected_sent", "rounds", "expected_rounds")


def as_row(
    name: str,
    medians: dict[str, Times],
    whole_ms: dict[str, list[float]],
    comm: Communicator,
    numel: int,
    k: int,
    link: Link,
) -> dict[str, Any]:
    """What is known of one call, by column; all that is measured is rank 0's.

    medians, whole_ms: of the case's calls, by name; whole_ms of every repeat.
    """
    mine, dense = medians[name], "mpi4py Allreduce"
    found: dict[str, Any] = {"algorithm": name, "whole_ms": 1e3 * mine["whole"], "whole_ms_samples": whole_ms[name]}
    found |= {f"{part}_ms": 1e3 * mine[part] if part in mine else None for part in PARTS}
    found["x_mpi"] = mine["whole"] / medians[dense]["whole"]
    found["x_mpi_least"] = min(whole_ms[name]) / min(whole_ms[dense])
    found["x_gloo"] = mine["whole"] / medians["gloo all_reduce"]["whole"]
    found |= dict.fromkeys(("x_link", *COUNTS))
    algorithm, dtype = ("dense", torch.bfloat16) if name == BF16 else (name, torch.float32)
    if algorithm in ALGORITHMS:
        expression = ALGORITHMS[algorithm].typical
        expected = expression(comm.rank, comm.size, k, numel, dtype)
        model = link.seconds(expected.nbytes, expected.rounds)
        found["x_link"] = (mine["exchange"] + mine.get("merge", 0.0)) / model
        found |= {"sent": int(mine["sent"]), "expected_sent": expected.nbytes}
        found |= {"rounds": int(mine["rounds"]), "expected_rounds": expected.rounds}
    return found


def as_text(rows: Sequence[dict[str, Any]]) -> str:
    """The table."""
    return table((*COLUMNS, *COUNTS), [[_cell(row[name]) for name in (*COLUMNS, *COUNTS)] for row in rows])


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float) and value >= 0.01:
        return f"{value:,.2f}"
    return value if isinstance(value, str) else f"{value:,}"
