"""How well ways learn, in tables: of learning, local-sgd, demo and convergence."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

from bench.form import RESULTS
from bench.pages.marked import NotOnRecordError, Records, table

VIT, CNN = "vit-digits", "cnn-digits"
UNDER_DDP = {
    ("torch bf16 hook", 1.0): "torch's `bf16_compress_hook`",
    ("dense bf16", 1.0): '`algorithm="dense", wire="bf16"`, which rounds and sums as it does',
    ("torch PowerSGD hook", 1.0): "torch's `powerSGD_hook`, rank 2, the first tenth of the steps dense",
    ("powersgd", 1.0): '`"powersgd"`, rank 2',
    ("dense-int8", 1.0): '`"dense-int8"`',
    ("gtopk", 0.01): "for comparison: updates by gtopk at 1 %, without DDP",
    ("gtopk, as first written", 0.01): 'a sparse exchange of gradients at 1 % ("as first written")',
}
"""(way, density) of convergence."""
WARM_UPS = {"gtopk, dense tenth": "a dense tenth", "gtopk": "DGC's, over a fifth"}
FEW = 0.001


def written(name: str) -> Callable[[Records], str]:
    """A table that the benchmark itself leaves beside its record."""

    def text(records: Records) -> str:
        if not (path := RESULTS / f"{name}.md").exists():
            raise NotOnRecordError(name)
        return path.read_text()

    return text


def settings(records: Records) -> str:
    """convergence-short's rows without clipping; the guide has all."""
    head, line, *rows = written("convergence-short")(records).splitlines()
    return "\n".join([head, line, *(row for row in rows if row.split("|")[3].strip() == "no")])


def periodic_averaging(records: Records) -> str:
    """Accuracy of the app beside what an exchange costs."""
    learnt = {row["algorithm"]: row for row in records["learning"]["rows"]}
    cost = {row["algorithm"]: row for row in records["local-sgd"]["rows"]}
    cost["dense"] = cost["synchronous"]
    return table(
        [
            {
                "`--algorithm`": f"`{name}`" + (", synchronous" if name == "dense" else ""),
                "accuracy, mean (least … most), %": f"{row['mean']:.1f} ({row['least']:.1f} … {row['most']:.1f})",
                "kB a step and rank": f"{row['bytes_a_step'] / 1e3:,.0f}",
                "overhead": f"{cost[name]['overhead']:.1%}" if cost[name]["overhead"] > 0 else "within noise",
                "hidden": f"{cost[name]['hidden'] or 0:.0%}",
            }
            for name, row in learnt.items()
            if name in cost
        ]
    )


def demo_seeds(records: Records) -> str:
    """Every seed on record."""
    record = records["demo"]
    return table(
        [
            {
                "`--seed`": row["algorithm"],
                **{str(seed): f"{score:.1f}" for seed, score in enumerate(samples["accuracy_samples"])},
                "mean ± sd": f"{row['mean']:.1f} ± {statistics.stdev(samples['accuracy_samples']):.1f}",
            }
            for row, samples in zip(record["rows"], record["samples"], strict=True)
        ]
    )


def adam_under_ddp(records: Records) -> str:
    """What a hook can do for Adam, on two small models."""
    found = _by(records, lambda row: (row["optimizer"], row["ranks"], row["steps"]) == ("adamw", 2, 264))
    lines = []
    for key, words in UNDER_DDP.items():
        cnn, vit = found[CNN, *key], found[VIT, *key]
        sent = vit["bytes_a_step"]
        lines.append(
            {
                "exchange": words,
                "CNN": f"{cnn['behind']:.1f}",
                "ViT": f"{vit['behind']:.1f}",
                "seeds": " and ".join(map(str, sorted({cnn["seeds"], vit["seeds"]}))),
                "kB a step": f"{sent / 1e3:.1f}" if sent else "–",
            }
        )
    return table(lines)


def adam_farther(records: Records) -> str:
    """More ranks, more steps, fewer entries: gTop-k with AdamW."""
    rows = [
        row
        for row in records["convergence"]["rows"]
        if (row["way"], row["optimizer"], row["clip"]) == ("gtopk", "adamw", 0.0) and row["behind"] is not None
    ]
    rows.sort(key=lambda row: (row["task"], -row["density"], row["ranks"], row["steps"]))
    return table(
        [
            {
                "task, steps": f"{row['task']}, {row['steps']:,}",
                "ranks": str(row["ranks"]),
                "density": f"{100 * row['density']:g} %",
                "behind dense (text: %)": f"{row['behind']:.1f}",
                "seeds": str(row["seeds"]),
            }
            for row in rows
        ]
    )


def adam_beta1(records: Records) -> str:
    """AdamW by its first beta, dense and by gTop-k at 1 %, beside dense with 0.9."""
    ways = {("gtopk", 0.01): "gtopk, β₁ 0.5", ("gtopk, beta1 0.9", 0.01): "gtopk, β₁ 0.9"}
    ways[("dense, beta1 0.5", 1.0)] = "dense, β₁ 0.5"
    found: dict[tuple[Any, ...], dict[str, str]] = {}
    for row in records["convergence"]["rows"]:
        said = ways.get((row["way"], row["density"]))
        if said and row["optimizer"] == "adamw" and not row["clip"] and row["behind"] is not None:
            key = row["task"], row["steps"], row["ranks"]
            found.setdefault(key, {})[said] = f"{row['behind']:.1f} ({row['seeds']})"
    return table(
        [
            {"task, steps (seeds)": f"{task}, {steps:,}", "ranks": str(ranks)}
            | {said: behind.get(said, "–") for said in ways.values()}
            for (task, steps, ranks), behind in sorted(found.items())
        ]
    )


def few_entries(records: Records) -> str:
    """gTop-k at 0.1 % with each of two warm-ups."""
    found: dict[tuple[Any, ...], dict[str, str]] = {}
    for row in records["convergence"]["rows"]:
        if row["way"] in WARM_UPS and row["density"] == FEW and not row["clip"] and row["behind"] is not None:
            task = f"{row['task']}, {row['steps']:,}"
            cells = found.setdefault((task, row["optimizer"], row["ranks"]), {})
            cells[WARM_UPS[row["way"]]] = f"{row['behind']:.1f} ({row['bytes_a_step'] / 1e3:.0f}; {row['seeds']})"
    return table(
        [
            {"task, steps": task, "optimizer": optimizer, **cells}
            for (task, optimizer, _), cells in sorted(found.items())
            if len(cells) == len(WARM_UPS)
        ]
    )


def _by(records: Records, wanted: Callable[[Mapping[str, Any]], bool]) -> dict[tuple[Any, ...], Mapping[str, Any]]:
    rows = records["convergence"]["rows"]
    return {(row["task"], row["way"], row["density"]): row for row in rows if wanted(row) and not row["clip"]}
