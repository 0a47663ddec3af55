"""Headlines of our own: is what is predicted measured, what is hidden, what is not waited for, what selection takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slow_link.check import TOLERANCE
from sparse_collectives.training.backward_order import BUCKET_BYTES

from bench.headlines.headline import MEASURED, Headline, Rows, detailed, times

HIDDEN = 0.95
"""Of an exchange, so that it counts as hidden."""


def slow_link_predictions(rows: Rows) -> Headline:
    """Real ranks' steps."""
    near = [row for row in rows if abs(row["ratio"] - 1) <= TOLERANCE]
    pairs = [pair for size in sorted({row["P"] for row in rows}) for pair in _dense_and_gtopk(rows, size)]
    told, kept = dict[str, list[str]](), []
    for name, dense, gtopk in pairs:
        gain, predicted = (dense[way] / gtopk[way] for way in ("measured_ms", "predicted_ms"))
        told.setdefault(name, []).append(f"{gain:.1f}× at P = {dense['P']}")
        kept.append(gain >= (1 - TOLERANCE) * predicted)
    return Headline(
        title="Real ranks behind 100 Mbit/s: gTop-k's step over dense, as predicted",
        published=f"(ours: ≥ {1 - TOLERANCE:.0%} of what is predicted)",
        ours="; ".join(f"{name}: {', '.join(gains)}" for name, gains in told.items()),
        how=MEASURED,
        record="predictions",
        reached=all(kept),
        shortfall=f"{sum(kept)} of {len(kept)} of these factors are at least {1 - TOLERANCE:.0%} of what `advise` "
        f"predicts, and {len(near)} of {len(rows)} whole steps are within {TOLERANCE:.0%}; the others compute most "
        "between their rounds, on cores that all ranks share. The warm-up, in which all is sent, is not in them.",
        details=[_pair(*pair) for pair in pairs],
    )


def _pair(name: str, dense: Mapping[str, Any], gtopk: Mapping[str, Any]) -> dict[str, str]:
    """A line of the table."""
    return {
        "P": str(dense["P"]),
        "which": name,
        "dense in": dense["wire"],
        "its step, ms (predicted)": f"{dense['measured_ms']:,.0f} ({dense['predicted_ms']:,.0f})",
        "gTop-k at, in": f"{gtopk['density']:.1%}, {gtopk['wire']}",
        "its step, ms (predicted) ": f"{gtopk['measured_ms']:,.0f} ({gtopk['predicted_ms']:,.0f})",
        "times as fast (predicted)": f"{dense['measured_ms'] / gtopk['measured_ms']:.1f}× "
        f"({dense['predicted_ms'] / gtopk['predicted_ms']:.1f}×)",
    }


def many_ranks(many: Mapping[str, Any]) -> Headline:
    """gTop-k's step over dense on more real ranks than cores."""
    rows = many["rows"]
    [size] = {row["P"] for row in rows}
    _, (_, dense, gtopk) = _dense_and_gtopk(rows, size)
    measured, predicted = (dense[way] / gtopk[way] for way in ("measured_ms", "predicted_ms"))
    return Headline(
        title=f"{size} real ranks behind {many['link']}: gTop-k's step over dense, as predicted",
        published=f"(ours: ≥ {1 - TOLERANCE:.0%} of what is predicted)",
        ours=f"{measured:.1f}× ({predicted:.1f}× predicted)",
        how=MEASURED,
        record="predictions",
        reached=measured >= (1 - TOLERANCE) * predicted,
        shortfall=f"Both in fp32, {gtopk['density']:.0%}: {dense['measured_ms']:,.0f} and {gtopk['measured_ms']:,.0f} "
        f"ms. gloo's ranks, which sleep while they wait; {size} of MPI's would keep the cores from each other. At so "
        "slow a link computing, which all ranks do on the same cores, is little beside the network.",
    )


def link_as_modelled(rows: Rows) -> Headline:
    """Ready vectors against α + β·bytes."""
    near = [row for row in rows if abs(row["measured_less_software_to_model"] - 1) <= TOLERANCE]
    far = sorted({f"{row['by']} ({row['what']} of {row['bytes']:,} bytes)" for row in rows if row not in near})
    why = f"Not: {', '.join(far)}, where microseconds of software count beside the delay. " if far else ""
    return Headline(
        title=f"Messages behind the emulated link within {TOLERANCE:.0%} of α + β·bytes",
        published="(ours: all)",
        ours=f"{len(near)} of {len(rows)}",
        how=MEASURED,
        record="slow-link",
        reached=len(near) == len(rows),
        shortfall=f"{why}Ready vectors, the tenth part of the repeats that was fastest, less what the same costs "
        "without a link.",
    )


def overlap_hides(rows: Rows) -> Headline:
    """Exchanges during backward."""
    most = max(row["batch"] for row in rows)
    default = {True: " (default)", False: ""}
    mine = [
        {**row, "default": default[row["bucket_MiB"] * 2**20 == BUCKET_BYTES]} for row in rows if row["batch"] == most
    ]
    best: dict[str, Mapping[str, Any]] = {}
    for row in mine:
        best[row["algorithm"]] = max(best.get(row["algorithm"], row), row, key=lambda one: float(one["hidden"]))
    columns = {
        "algorithm": "{algorithm}",
        "bucket, MiB": "{bucket_MiB:g}{default}",
        "computing, ms": "{compute:.0f}",
        "exchange, ms": "{exchange:.0f}",
        "hidden": "{hidden:.1%}",
        "forward, backward and step, ms": "{overlapped:.0f}",
    }
    return Headline(
        title="The share of an exchange that backward hides",
        published=f"(ours: ≥ {HIDDEN:.0%})",
        ours=", ".join(f"{row['hidden']:.1%} ({name}, {row['bucket_MiB']:g} MiB)" for name, row in best.items()),
        how=MEASURED,
        record="overlap",
        reached=min(row["hidden"] for row in best.values()) >= HIDDEN,
        shortfall="Real ranks behind the emulated link, where computing takes twice as long as exchanging, with the "
        "bucket size that hides most; what hides most need not give the shortest step.",
        details=detailed(mine, columns),
    )


def late_rank(rows: Rows) -> Headline:
    """Real ranks, one of them late."""
    ways = {row["how"]: row["delayed_ms"] for row in rows}
    return Headline(
        title="An allreduce's milliseconds while one of four ranks is late",
        published="(ours: less by majority)",
        ours=f"{ways['plain allreduce']:.0f} → {ways['majority']:.1f} (majority), {ways['solo']:.1f} (solo)",
        how=MEASURED,
        record="partial",
        reached=ways["majority"] < ways["plain allreduce"],
        shortfall="At the ranks that are not late; the late one's gradient goes to a later round.",
    )


def selection(rows: Rows) -> Headline:
    """Exact top-k."""
    mine = [row["speedup"] for row in rows if row["what"] == "top-k"]
    return Headline(
        title="Exact top-k over torch.topk on a CPU core",
        published="(ours: ≥ 1×)",
        ours=times(mine),
        how=MEASURED,
        record="compress",
        reached=min(mine) >= 1,
        shortfall="Ties by lowest index, which torch.topk does not promise.",
    )


def _dense_and_gtopk(rows: Rows, size: int) -> list[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    """(name, dense, gTop-k): the fastest settings of both, and both in fp32 where most entries are sent."""
    dense, gtopk = ([row for row in rows if (row["algorithm"], row["P"]) == (n, size)] for n in ("dense", "gtopk"))
    fastest = [min(found, key=lambda row: float(row["measured_ms"])) for found in (dense, gtopk)]
    plain = [[row for row in found if row["wire"] == "fp32"] for found in (dense, gtopk)]
    alike = [max(found, key=lambda row: float(row["density"])) for found in plain]
    return [
        ("fastest of both", fastest[0], fastest[1]),
        (f"both in fp32, {alike[1]['density']:.0%}", alike[0], alike[1]),
    ]
