"""The measured tables of sparse-compress' page: blocks of what ``compress`` and ``compress-gpu`` recorded."""

from collections.abc import Iterator
from typing import Any

from sparse_compress import HEADER_BYTES, WireCodec, index_entropy

from bench.pages.marked import Records

MACHINE = ("machine", "cores", "Python", "torch", "NumPy", "load", "GPU")
"""Of the circumstances, what times depend on."""
# (row, n, 1/density): least speed-up over torch, most sweeps, most milliseconds.
TARGETS: dict[tuple[str, int, int], tuple[float | None, float | None, float | None]] = {
    ("top-k", 25_600_000, 100): (15, 6, None),
    ("top-k", 25_600_000, 1000): (15, 4, None),
    ("error feedback step", 25_600_000, 100): (15, None, None),
    ("error feedback step", 25_600_000, 1000): (12, None, None),
    ("top-k", 1_000_000, 100): (4, None, None),
    ("top-k", 1_000_000, 1000): (2.5, None, None),
    ("error feedback step", 1_000_000, 100): (4, None, None),
    ("error feedback step", 1_000_000, 1000): (2.5, None, None),
    ("merge", 25_000_000, 100): (None, None, 10),
}


def speed(records: Records) -> str:
    """The table of times, and of targets where there are any; threads; levels."""
    return "\n".join(_speed(records["compress"]))


def gpu_speed(records: Records) -> str:
    """The table of a GPU's times."""
    return "\n".join(_gpu_speed(records["compress-gpu"]))


def codec_bytes(records: Records) -> str:
    """Bytes of an entry of a vector of 25 million elements, headers left out, next to the entropy bound."""
    del records  # an expression, not a measurement
    return "\n".join(_codec_bytes())


def _speed(results: dict[str, Any]) -> Iterator[str]:
    facts = results["circumstances"]
    yield "Measured on " + ", ".join(f"{name} {facts[name]}" for name in MACHINE if name in facts) + "."
    yield ""
    yield "| | n | k | this package | torch | faster | read passes | target | |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in results["rows"]:
        target, met = verdict(row)
        cells = [
            row["what"], f"{row['n']:,}", f"{row['k']:,}", f"{row['ours_ms']:.2f} ms", f"{row['torch_ms']:.1f} ms",
            f"{row['speedup']:.1f}×", f"{row['sweeps']:.1f}" if row["what"] != "merge" else "", target, met,
        ]  # fmt: skip
        yield f"| {' | '.join(cells)} |"
    yield ""
    yield "| | n | k | one thread | more given | ratio |"
    yield "|---|---|---|---|---|---|"
    for row in results["threads"]:
        yield (
            f"| {row['what']} | {row['n']:,} | {row['k']:,} | {row['one_ms']:.2f} ms "
            f"| {row['threads']}: {row['more_ms']:.2f} ms | {row['more_ms'] / row['one_ms']:.2f} |"
        )
    yield ""
    yield "| least of a run, one thread | n | in | NumPy | C | AVX2 | AVX-512 |"
    yield "|---|---|---|---|---|---|---|"
    for row in results["levels"]:
        times = (row[level] for level in ("plain", "c", "avx2", "avx512"))
        cells = ["" if time is None else f"{time:.2f}" for time in times]
        yield f"| {row['what']} | {row['n']:,} | {row['unit']} | {' | '.join(cells)} |"


def _gpu_speed(results: dict[str, Any]) -> Iterator[str]:
    yield f"Measured on {results['circumstances']['GPU']}, torch {results['circumstances']['torch']}."
    yield ""
    yield "| | n | k | this package | torch | faster | times the floor |"
    yield "|---|---|---|---|---|---|---|"
    for row in results["rows"]:
        yield (
            f"| {row['what']} | {row['n']:,} | {row['k']:,} | {row['ours_ms']:.3f} ms | {row['torch_ms']:.3f} ms "
            f"| {row['speedup']:.1f}× | {row['ours_ms'] / row['floor_ms']:.2f} |"
        )


def verdict(row: dict[str, Any]) -> tuple[str, str]:
    """What was asked of a row, and whether it was met."""
    if row["radix_ms"] is not None:
        ratio = row["ours_ms"] / row["radix_ms"]
        met = ratio <= 2 and row["ours_ms"] <= 4 * row["torch_ms"]
        return "≤ 2× radix select, ≤ 4× torch", f"{ratio:.2f}× radix select, {'met' if met else 'missed'}"
    asked = TARGETS.get((row["what"], row["n"], round(row["n"] / row["k"])))
    if asked is None:
        return "", ""
    faster, sweeps, milliseconds = asked
    limits = [
        (faster, f"≥ {faster}×", row["speedup"] >= (faster or 0)),
        (sweeps, f"≤ {sweeps} passes", row["sweeps"] <= (sweeps or 0)),
        (milliseconds, f"≤ {milliseconds} ms", row["ours_ms"] <= (milliseconds or 0)),
    ]
    asked_for = [(text, met) for limit, text, met in limits if limit is not None]
    missed = [text for text, met in asked_for if not met]
    return ", ".join(text for text, _ in asked_for), "missed: " + ", ".join(missed) if missed else "met"


def _codec_bytes() -> Iterator[str]:
    n = 25_000_000
    yield "| density | fp32 raw | bf16 raw | bf16 packed | int8 packed | packed index | entropy of the indices |"
    yield "|---|---|---|---|---|---|---|"
    for density in (0.1, 0.01, 0.001, 0.0001):
        k = round(density * n)
        kinds = [("fp32", "raw"), ("bf16", "raw"), ("bf16", "packed"), ("int8", "packed")]
        sizes = [(WireCodec(*kind).nbytes(k, n) - HEADER_BYTES) / k for kind in kinds]
        index = sizes[2] - 2
        cells = [f"{100 * density:g} %", *(f"{size:.2f}" for size in (*sizes, index, index_entropy(k, n)))]
        yield f"| {' | '.join(cells)} |"
