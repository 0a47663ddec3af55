"""The advice as text, as JSON and as a picture."""

import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from communicators import Link, shares_by_rate
from sparse_collectives import ALGORITHMS, prediction

from thinwire.advice.accuracy import in_a_column, judged, of_models
from thinwire.advice.measuring import NoAdvice
from thinwire.advice.recommendation import dense_step, recommend
from thinwire.advice.situation import Situation, Step
from thinwire.advice.ways import WHOLE

GIGABITS = tuple(0.05 * 2**i for i in range(14))
RANKS = (2, 3, 4, 6, 8, 12, 14, 16, 24, 32, 48, 64, 128)
"""Axis of the picture."""
SLOW = 8e-9
"""Seconds per byte: links of all ranks that take less, 1 Gbit/s or more, are not said to be unequal."""
UNEQUAL = 1.2
"""Least gain by shares that is spoken of."""
BUSY = 0.1
"""A share of the time from which on it is said: by as much are times too long."""
TIMES = ("select ms", "network ms", "merge ms", "later ms", "mean ms")
EXCHANGE = ("algorithm", "options", "density", "wire", "nbytes", "rounds")
HEADER = ("algorithm", "density", "wire", "sent", "rounds", *TIMES, "steps", "speed-up", "behind")
LEGEND = (
    "later: a step after the warm-up; mean: a step averaged over the whole training, the advised warm-up included\n"
    "steps: needed to become as good as dense is at its end, as a multiple of dense's, in small trainings\n"
    "speed-up: of the time until then, where it is known to learn within a point of dense; elsewhere of the mean step\n"
    "behind: points of accuracy (of text: percent of perplexity) below dense in small trainings, of each task on\n"
    "the number of ranks nearest to yours that was measured; ?: not measured"
)


def as_text(situation: Situation) -> str:
    """Premises, table and recommendation. Shows each algorithm and density with its fastest wire and fp32."""
    steps = situation.predictions()
    dense = dense_step(steps)
    rows = [_cells(situation, step, dense) for step in _shown(steps)]
    parts = [
        _premises(situation),
        f"{prediction.table(HEADER, rows)}\n{LEGEND}",
        recommend(situation).text,
        _unequal(situation),
        _warning(situation),
    ]
    return "\n\n".join(part for part in parts if part)


def _cells(situation: Situation, step: Step, dense: float) -> tuple[str, ...]:
    p, later, mean, until = step
    times = map(prediction.milliseconds, (p.compression, p.latency + p.transfer, p.merging, later, mean))
    found = situation.known(p)
    pace, behind = "?" if found is None else f"{found.pace:.2f}" if found.pace else "never", in_a_column(found)
    if p.algorithm in WHOLE:
        pace, behind = "1.00", ""
    how = (p.variant, f"{p.density:.2g}", p.wire, prediction.amount(p.nbytes), str(p.rounds))
    return (*how, *times, pace, f"{dense / until:.2f}×", behind)


def as_json(situation: Situation) -> str:
    """The same as one object; seconds and bytes throughout."""
    steps, advice = situation.predictions(), recommend(situation)
    row = partial(_row, situation, dense=dense_step(steps))
    late = situation.stragglers
    words = {"rule": advice.rule, "reason": advice.reason, "text": advice.text}
    found = {
        "parameters": situation.numel,
        "ranks": situation.ranks,
        "optimizer": situation.optimizer,
        "data": situation.data,
        "judged_by": judged(situation.optimizer, situation.data),
        "device": situation.device,
        "compute_seconds": situation.compute,
        "overlapped_seconds": situation.hidden,
        "link": {"name": situation.link_name, **vars(situation.link)},
        "pairs": situation.pairs and vars(situation.pairs),
        "seconds_per_byte": situation.paths and situation.paths.slower,
        "unequal": _unequal(situation),
        "stragglers": late and {"mean_seconds": late.mean(situation.ranks), "last_seconds": late.late(situation.ranks)},
        "taken_by_others": situation.taken,
        "warning": _warning(situation),
        "handling": [{"density": density, **costs._asdict()} for density, costs in situation.handling.items()],
        "predictions": [row(step) for step in steps],
        "recommendation": {**row(advice.step), **words, "runner_up": advice.runner_up and row(advice.runner_up)},
    }
    return json.dumps(found, indent=1)


def _row(situation: Situation, step: Step, dense: float) -> dict[str, Any]:
    p, later, mean, until = step
    found = situation.known(p)
    return {
        **{name: getattr(p, name) for name in EXCHANGE},
        "compression_seconds": p.compression,
        "network_seconds": p.latency + p.transfer,
        "merging_seconds": p.merging,
        "step_seconds": later,
        "mean_step_seconds": mean,
        "speedup_after_warm_up": dense / later,
        "steps_until_as_good": 1.0 if p.algorithm in WHOLE else found and found.pace,
        "speedup": dense / until,
        "accuracy": found and found._asdict(),
    }


def _unequal(situation: Situation) -> str | None:
    """Advice for ranks whose links are slower than others'; None where they are nearly alike, or fast."""
    rates = [] if situation.paths is None else situation.paths.slower
    if len(rates) < 3 or max(rates) <= SLOW:
        return None
    equal, by_rate = (4 * situation.numel * _busiest(rates, own) for own in ([1 / len(rates)] * len(rates), None))
    if equal < UNEQUAL * by_rate:
        return None
    slowest, median = rates.index(max(rates)), statistics.median(rates)
    return (
        f"Links are unequal: rank {slowest} has {8e-6 / max(rates):.3g} Mbit/s, the median rank {8e-6 / median:.3g}; "
        "the times above are the slowest rank's.\n"
        "Where models are averaged in full precision (DiLoCo, LocalSGD), shares=shares_by_rate(measure_paths(None)."
        f"slower), both of communicators, lets a mean take {prediction.milliseconds(by_rate)} ms instead of "
        f"{prediction.milliseconds(equal)}.\n"
        "Who waits for slow ranks need not: DiLoCo and StreamingDiLoCo by rounds (guide on slow links)."
    )


def _busiest(rates: Sequence[float], shares: Sequence[float] | None) -> float:
    """Seconds per byte of a sum, of the rank that it takes longest; shares None: those by rate."""
    those = zip(rates, shares or shares_by_rate(rates), strict=True)
    return max(rate * (1 + share * (len(rates) - 2)) for rate, share in those)


def _warning(situation: Situation) -> str | None:
    """Warning that a busy machine has distorted the measurements."""
    if situation.taken < BUSY:
        return None
    longer = 1 / max(0.01, 1 - situation.taken)
    return (
        f"Warning: the machine was busy. Other processes, or more ranks than it has cores, held a rank up for "
        f"{situation.taken:.0%} of the time.\n"
        f"What was measured may be {longer:.1f} times too long, and the advice rests on it: ask again on an idle one."
    )


def _shown(steps: list[Step]) -> list[Step]:
    fastest: dict[tuple[str, float], Step] = {}
    for step in steps:
        fastest.setdefault((step.prediction.algorithm, step.prediction.density), step)
    return [step for step in steps if step.prediction.wire == "fp32" or step in fastest.values()]


def _premises(situation: Situation) -> str:
    compute, hidden = prediction.milliseconds(situation.compute), prediction.milliseconds(situation.hidden)
    overlap = f"buckets travel during the {hidden} ms of backward" if situation.hidden else "no overlap"
    lines = [f"{situation.numel:,} parameters, {compute} ms a step without communication, {overlap}"]
    lines.append(f"{situation.ranks} ranks, {_network(situation)}")
    if situation.data:
        counted, more = judged(situation.optimizer, situation.data), ""
        if counted != situation.data:
            more = f": none {of_models(situation.data)} with {situation.optimizer} is on record"
        elif "/" in counted:
            more = ", or of other models where a way has too few"
        lines.append(f"how ways learn is judged by small trainings {of_models(counted)}{more}")
    if late := situation.stragglers:
        mean, waited = map(prediction.milliseconds, (late.mean(situation.ranks), late.late(situation.ranks)))
        lines.append(f"a rank is late by {mean} ms a step in the mean, the last of all by {waited} ms")
    around = " and the optimizer around it" if situation.sends_updates else ""
    for density, own in situation.handling.items():
        merge = [1e9 * own.merge[name] for name in ALGORITHMS if name in own.merge]
        lines.append(
            f"measured on this {situation.device}, at density {density:g}: selecting{around} "
            f"{1e9 * own.compress:.3g} ns an element, merging {min(merge):.3g} to {max(merge):.3g} ns an entry"
        )
    return "\n".join(lines)


def _network(situation: Situation) -> str:
    link = speed(situation.link)
    if situation.pairs is not None:
        pairs = speed(situation.pairs)
        return f"measured: {link} while all send and receive; in pairs, one way at a time: {pairs}"
    return f"assumed to be joined by {'' if situation.link_name == 'given' else f'{situation.link_name}: '}{link}"


def speed(link: Link) -> str:
    """Latency and bandwidth of a link, as text."""
    rate = f"{8e-9 / link.beta:.3g} Gbit/s" if link.beta else "no limit of bandwidth"
    micros = 1e6 * link.alpha
    return f"{micros:,.0f} µs a message, {rate}" if micros >= 10 else f"{micros:.2g} µs a message, {rate}"


def check_plot(path: Path) -> None:
    """Raises NoAdvice if matplotlib is missing or the file cannot be written; called before anything is measured."""
    known, folder = sorted(_figure().canvas.get_supported_filetypes()), path.parent
    if path.suffix[1:].lower() not in known:
        raise NoAdvice(f"--plot {path}: expected a file name that ends in .{', .'.join(known)}")
    if not folder.is_dir():
        raise NoAdvice(f"--plot {path}: there is no folder {folder}; make it first")
    if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise NoAdvice(f"--plot {path}: it cannot be written there")


def plot(situation: Situation, path: Path) -> None:
    """Writes the picture. Raises NoAdvice where the file cannot be written."""
    figure, alpha = _figure(), situation.link.alpha
    bandwidth, ranks = figure.subplots(1, 2)
    over_bandwidth = [replace(situation, link=Link(alpha, 8e-9 / gigabits)) for gigabits in GIGABITS]
    _draw(bandwidth, GIGABITS, over_bandwidth, f"Gbit/s, at {1e6 * alpha:.0f} µs and {situation.ranks} ranks")
    over_ranks = [replace(situation, ranks=size) for size in RANKS]
    _draw(ranks, RANKS, over_ranks, f"ranks, on the link {situation.link_name}")
    bandwidth.set_ylabel("speed-up of a training over dense float32")
    bandwidth.legend(fontsize="small")
    figure.suptitle(f"{situation.numel:,} parameters, {situation.compute:.3g} s of computing a step")
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise NoAdvice(f"--plot {path}: {error}") from error


def _speedups(situation: Situation) -> dict[str, float]:
    """Speed-up of a training over dense of every line drawn: of each algorithm and density the fastest wire's."""
    steps = situation.predictions()
    slowest_first = [(p, dense_step(steps) / until) for p, *_, until in reversed(steps) if p.name != "dense"]
    return {f"{p.algorithm} {f'{p.density:.2g}' if p.density < 1 else p.wire}": gain for p, gain in slowest_first}


def _draw(axis: Any, xs: Sequence[float], situations: list[Situation], label: str) -> None:
    from matplotlib.ticker import LogLocator

    lines = [_speedups(situation) for situation in situations]
    for name in sorted(lines[0]):
        axis.plot(xs, [line[name] for line in lines], label=name)
    axis.axhline(1.0, color="black", linewidth=0.8)
    axis.set(xscale="log", yscale="log", xlabel=label)
    axis.grid(alpha=0.3)
    axis.xaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_minor_formatter("")


def _figure() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise NoAdvice("--plot needs matplotlib: pip install matplotlib") from error
    return Figure(figsize=(11, 4.5), layout="constrained")
