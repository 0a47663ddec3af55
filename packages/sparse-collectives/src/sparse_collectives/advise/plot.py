"""A picture of the speed-up over dense, against bandwidth and against ranks. Needs matplotlib."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from communicators import Link

from sparse_collectives.advise.all_or_none import NoAdvice
from sparse_collectives.advise.recommendation import dense_step
from sparse_collectives.advise.situation import Situation
from sparse_collectives.prediction.cost import Prediction

GIGABITS = tuple(0.05 * 2**i for i in range(14))
RANKS = (2, 3, 4, 6, 8, 12, 14, 16, 24, 32, 48, 64, 128)


def check_plot(path: Path) -> None:
    """Raises NoAdvice if matplotlib is missing or the file cannot be written; called before anything is measured."""
    _, figure = _axes()
    known, folder = sorted(figure.canvas.get_supported_filetypes()), path.parent
    if path.suffix[1:].lower() not in known:
        raise NoAdvice(f"--plot {path}: expected a file name that ends in .{', .'.join(known)}")
    if not folder.is_dir():
        raise NoAdvice(f"--plot {path}: there is no folder {folder}; make it first")
    if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise NoAdvice(f"--plot {path}: it cannot be written there")


def plot(situation: Situation, path: Path) -> None:
    """Writes the picture. Raises NoAdvice where the file cannot be written."""
    axes, figure = _axes()
    alpha = situation.link.alpha
    over_bandwidth = [situation.elsewhere(link=Link(alpha, 8e-9 / gigabits)) for gigabits in GIGABITS]
    _draw(axes[0], GIGABITS, over_bandwidth, f"Gbit/s, at {1e6 * alpha:.0f} µs and {situation.ranks} ranks")
    over_ranks = [situation.elsewhere(ranks=ranks) for ranks in RANKS]
    _draw(axes[1], RANKS, over_ranks, f"ranks, on the link {situation.link_name}")
    axes[0].set_ylabel("speed-up of a training over dense float32")
    axes[0].legend(fontsize="small")
    figure.suptitle(f"{situation.numel:,} parameters, {situation.compute:.3g} s of computing a step")
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise NoAdvice(f"--plot {path}: {error}") from error


def speedups(situation: Situation) -> dict[str, float]:
    """Speed-up of a training over dense of every line drawn: of each algorithm and density the fastest wire's."""
    steps = situation.predictions()
    dense = dense_step(steps)
    found: dict[str, float] = {}
    for prediction, _, mean in steps:
        if prediction.name != "dense":
            found.setdefault(_label(prediction), dense / mean)
    return found


def _label(p: Prediction) -> str:
    return f"{p.algorithm} {p.density:.2g}" if p.density < 1 else f"{p.algorithm} {p.wire}"


def _draw(axis: Any, xs: tuple[float, ...], situations: list[Situation], label: str) -> None:
    from matplotlib.ticker import LogLocator

    lines = [speedups(situation) for situation in situations]
    for name in sorted(lines[0]):
        axis.plot(xs, [line[name] for line in lines], label=name)
    axis.axhline(1.0, color="black", linewidth=0.8)
    axis.set_xscale("log")
    axis.set_yscale("log")
    for ticks in (axis.xaxis, axis.yaxis):
        ticks.set_major_formatter("{x:g}")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_minor_formatter("")
    axis.set_xlabel(label)
    axis.grid(alpha=0.3)


def _axes() -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise NoAdvice("--plot needs matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    return figure.subplots(1, 2), figure
