"""The advice as text and as JSON."""

from __future__ import annotations

import json
from typing import Any

from communicators import Link

from sparse_collectives.advise.accuracy import in_a_column
from sparse_collectives.advise.busy import BUSY
from sparse_collectives.advise.recommendation import dense_step, recommend
from sparse_collectives.advise.situation import Situation, Steps
from sparse_collectives.algorithms.table import ALGORITHMS
from sparse_collectives.prediction.cost import Prediction
from sparse_collectives.prediction.plain_table import amount, milliseconds, table

HEADER = (
    "algorithm",
    "density",
    "wire",
    "sent",
    "rounds",
    "select ms",
    "network ms",
    "merge ms",
    "later ms",
    "mean ms",
    "speed-up",
    "behind",
)


LEGEND = (
    "later: a step after the warm-up; mean: a step over the whole training, with the warm-up that is advised; "
    "speed-up: of the mean\n"
    "behind: points of accuracy (of text: percent of perplexity) below dense in small trainings, of each task on\n"
    "the number of ranks nearest to yours that was measured; ?: not measured"
)


def as_text(situation: Situation) -> str:
    """Premises, table and recommendation. Shows each algorithm and density with its fastest wire and fp32."""
    steps = situation.predictions()
    dense = dense_step(steps)
    rows = [
        (
            p.variant,
            f"{p.density:.2g}",
            p.wire,
            amount(p.nbytes),
            str(p.rounds),
            *map(milliseconds, (p.compression, p.latency + p.transfer, p.merging, later, mean)),
            f"{dense / mean:.2f}×",
            "" if p.density == 1 else in_a_column(situation.known(p)),
        )
        for p, later, mean in _shown_of(steps)
    ]
    told = [_premises(situation), table(HEADER, rows) + "\n" + LEGEND, recommend(situation).text]
    return "\n\n".join([*told, warning(situation)] if is_busy(situation) else told)


def as_json(situation: Situation) -> str:
    """The same as one object; seconds and bytes throughout."""
    steps = situation.predictions()
    dense = dense_step(steps)
    recommendation = recommend(situation)._asdict()
    return json.dumps(
        {
            "parameters": situation.numel,
            "ranks": situation.ranks,
            "optimizer": situation.optimizer,
            "device": situation.device,
            "compute_seconds": situation.compute,
            "overlapped_seconds": situation.hidden,
            "link": {"name": situation.link_name, **vars(situation.link)},
            "pairs": None if situation.pairs is None else vars(situation.pairs),
            "taken_by_others": situation.taken,
            "warning": warning(situation) if is_busy(situation) else None,
            "handling": [{"density": density, **costs._asdict()} for density, costs in situation.handling.items()],
            "predictions": [
                {
                    "algorithm": p.algorithm,
                    "options": dict(p.options),
                    "density": p.density,
                    "wire": p.wire,
                    "nbytes": p.nbytes,
                    "rounds": p.rounds,
                    "compression_seconds": p.compression,
                    "network_seconds": p.latency + p.transfer,
                    "merging_seconds": p.merging,
                    "step_seconds": later,
                    "mean_step_seconds": mean,
                    "speedup_after_warm_up": dense / later,
                    "speedup": dense / mean,
                    "accuracy": _accuracy(situation, p),
                }
                for p, later, mean in steps
            ],
            "recommendation": recommendation,
        },
        indent=1,
    )


def _accuracy(situation: Situation, p: Prediction) -> dict[str, Any] | None:
    found = situation.known(p)
    return None if found is None or p.density == 1 else found._asdict()


def is_busy(situation: Situation) -> bool:
    """Whether other programs used the cores so much that the measurements are noise."""
    return situation.taken >= BUSY


def warning(situation: Situation) -> str:
    """Warning that a busy machine has distorted the measurements."""
    longer = 1 / max(0.01, 1 - situation.taken)
    return (
        f"Warning: the machine was busy. Other processes, or more ranks than it has cores, held a rank up for "
        f"{situation.taken:.0%} of the time.\n"
        f"What was measured may be {longer:.1f} times too long, and the advice rests on it: ask again on an idle one."
    )


def _shown_of(steps: Steps) -> Steps:
    fastest: dict[tuple[str, float], Prediction] = {}
    for p, *_ in steps:
        fastest.setdefault((p.algorithm, p.density), p)
    return [step for step in steps if step.prediction.wire == "fp32" or step.prediction in fastest.values()]


def _premises(situation: Situation) -> str:
    compute, hidden = milliseconds(situation.compute), milliseconds(situation.hidden)
    overlap = f"buckets travel during the {hidden} ms of backward" if situation.hidden else "no overlap"
    lines = [
        f"{situation.numel:,} parameters, {compute} ms a step without communication, {overlap}",
        f"{situation.ranks} ranks, {_network(situation)}",
    ]
    for density, own in situation.handling.items():
        select, merge = 1e9 * own.compress, [1e9 * own.merge[name] for name in ALGORITHMS if name in own.merge]
        lines.append(
            f"measured on this {situation.device}, at density {density:g}: selecting {select:.3g} ns an element, "
            f"merging {min(merge):.3g} to {max(merge):.3g} ns an entry"
        )
    return "\n".join(lines)


def _network(situation: Situation) -> str:
    link = _shown(situation.link)
    if situation.link_name == "given":
        return f"assumed to be joined by {link}"
    if situation.pairs is None:
        return f"assumed to be joined by {situation.link_name}: {link}"
    return f"measured: {link} while all send and receive; in pairs, one way at a time: {_shown(situation.pairs)}"


def _shown(link: Link) -> str:
    rate = f"{8e-9 / link.beta:.3g} Gbit/s" if link.beta else "no limit of bandwidth"
    micros = 1e6 * link.alpha
    return f"{micros:,.0f} µs a message, {rate}" if micros >= 10 else f"{micros:.2g} µs a message, {rate}"
