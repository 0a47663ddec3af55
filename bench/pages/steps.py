"""What steps and calls take, in words: of predictions and collectives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.pages.marked import Records, prose

NEAR = 0.2
"""Of a prediction, so that it counts as near."""


def first_figure(records: Records) -> str:
    """The root README's: dense and gTop-k on four ranks, both in fp32, and the fastest of both."""
    four = [row for row in records["predictions"]["rows"] if row["P"] == 4]
    dense, gtopk = (next(row for row in four if _is(row, *key)) for key in (("dense", 1.0), ("gtopk", 0.01)))
    slow, fast = (min((row for row in four if row["algorithm"] == name), key=_measured) for name in ("dense", "gtopk"))
    return prose(
        f"**Measured:** four real ranks behind an emulated link of 100 Mbit/s took {_measured(dense):,.0f} ms for a "
        f"training step with dense allreduce, and {_measured(gtopk):,.0f} ms with gTop-k at 1 % of the entries: "
        f"{_measured(dense) / _measured(gtopk):.0f} times as fast, where computing takes {dense['compute_ms']:.0f} ms "
        "([record](bench/results/predictions.csv), `hatch run bench predictions`). That is fp32 beside fp32, after the "
        f"warm-up; the fastest of both (dense in {slow['wire']} and gTop-k at {100 * fast['density']:g} %) are "
        f"{_measured(slow) / _measured(fast):.1f} times apart, and `advise` had predicted "
        f"{gtopk['predicted_ms']:.0f} of the {_measured(gtopk):.0f} ms."
    )


def calls(records: Records) -> str:
    """Sparse calls beside MPI's dense one over shared memory."""
    record = records["collectives"]
    rows = [row for row in record["rows"] if (row["P"], row["density"]) == (2, 0.01) and row["select_ms"] is not None]
    told = []
    for n in sorted({row["n"] for row in rows}, reverse=True):
        factors = [row["x_mpi"] for row in rows if row["n"] == n]
        told.append(f"{min(factors):.2f} to {max(factors):.2f} times as long at n = {n:,}")
    return prose(
        f"Over shared memory ({record['circumstances']['cores']} cores, compiled kernels) a sparse call of two ranks "
        f"at 1 %, its selection included, took {' and '.join(told)} as MPI's dense allreduce "
        "([record](bench/results/collectives.csv))."
    )


def predictions(records: Records) -> str:
    """How near what is predicted was to what was measured, and whether the choice was the best."""
    record = records["predictions"]
    rows = record["rows"]
    far = [row for row in rows if abs(row["ratio"] - 1) > NEAR]
    worst = {name: max((row for row in far if row["algorithm"] == name), key=_off) for name in _algorithms(far)}
    others = ", ".join(f"`{name}` by up to {_off(row):.0%} at P = {row['P']}" for name, row in worst.items())
    way = "too low" if all(row["ratio"] < 1 for row in far) else "too low or too high"
    return prose(
        f"On {record['circumstances']['cores']} cores, {len(rows) - len(far)} of {len(rows)} predictions were within "
        f"{NEAR:.0%} of the measured step ([record](../bench/results/predictions.csv)). "
        + (f"The others were {way}: {others}. " if far else "")
        + " ".join(_choice([row for row in rows if row["P"] == size]) for size in sorted({row["P"] for row in rows}))
    )


def _choice(rows: Sequence[Mapping[str, Any]]) -> str:
    """Whether what is predicted to be fastest was."""
    chosen, best = min(rows, key=lambda row: float(row["predicted_ms"])), min(rows, key=_measured)
    if chosen is best:
        return f"At P = {best['P']} the first choice was the best measured one."
    return f"At P = {best['P']} the first choice was {_measured(chosen) / _measured(best) - 1:.0%} behind the best."


def _algorithms(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(row["algorithm"] for row in rows))


def _is(row: Mapping[str, Any], algorithm: str, density: float) -> bool:
    return (row["algorithm"], row["density"], row["wire"]) == (algorithm, density, "fp32")


def _measured(row: Mapping[str, Any]) -> float:
    return float(row["measured_ms"])


def _off(row: Mapping[str, Any]) -> float:
    return abs(float(row["ratio"]) - 1)
