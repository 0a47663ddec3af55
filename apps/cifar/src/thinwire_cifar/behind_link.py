"""An epoch of the demo behind an emulated slow link, where this machine can emulate one: see `slow_link`."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from thinwire_trainer.launching.workers import find_mpiexec, worker_environment

RATE_MBIT, DELAY_MS = 100, 1
LONGEST = 60  # seconds that an algorithm may take, torch's start included; on an idle machine it is a sixth


def measured(ranks: int) -> Mapping[str, Mapping[str, float]] | str:
    """Seconds of a step by algorithm, "measured" and "predicted"; or why there is nothing."""
    if importlib.util.find_spec("slow_link") is None:
        return "`slow_link`, which emulates one, is not installed: pip install thinwire-cifar[link]"
    from communicators import Link
    from thinwire_trainer.records.metrics import read_metrics
    from thinwire_trainer.records.run_folder import RunFolder

    from thinwire_cifar.comparison import ALGORITHMS, predicted, summarise

    with TemporaryDirectory() as folder:
        runs = {name: RunFolder(Path(folder, name)) for name in ALGORITHMS}
        for name, run in runs.items():
            if said := _trained(ranks, [*ALGORITHMS[name], f"--output={run.path}"]):
                return said
        summaries = {name: summarise(read_metrics(run.metrics.path), images=1) for name, run in runs.items()}
        numel = runs["dense"].recorded()["parameters"]
    link = Link(alpha=1e-3 * DELAY_MS, beta=8e-6 / RATE_MBIT)
    steps = predicted(summaries, link, numel=numel, size=ranks)
    return {name: {"measured": each.step, "predicted": steps[name].step} for name, each in summaries.items()}


def _trained(ranks: int, flags: list[str]) -> str:
    """Why an epoch could not be trained behind the link; "" where it was."""
    link = ["--rate", f"{RATE_MBIT}mbit", "--delay", f"{DELAY_MS}ms", "--timeout", str(LONGEST)]
    trains = [sys.executable, "-m", "thinwire_cifar", "--max-epochs", "1", "--checkpoint-every", "0", *flags]
    command = [sys.executable, "-m", "slow_link", *link, "--", find_mpiexec(), "-n", str(ranks), *trains]
    done = subprocess.run(
        command, env=worker_environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
    )
    if done.returncode == 0:
        return ""
    said = (done.stderr or done.stdout).strip().splitlines() or ["nothing was said"]
    return f"{said[-1].removeprefix('slow_link: ')} (status {done.returncode})"


def shown(found: Mapping[str, Mapping[str, float]] | str) -> str:
    """A line for each algorithm, or the reason for none."""
    heading = f"behind {RATE_MBIT} Mbit/s and {DELAY_MS} ms"
    if isinstance(found, str):
        return f"Not measured {heading}: {found}"
    lines = [f"A step, measured {heading}, and predicted for it:"]
    lines += [
        f"  {name:10} measured {1e3 * row['measured']:6.1f} ms   predicted {1e3 * row['predicted']:6.1f} ms"
        for name, row in found.items()
    ]
    (_, dense), (name, sparse) = found.items()
    times = dense["measured"] / sparse["measured"]
    lines.append(f"{name} steps are {times:.2f} times as fast there, measured, by real ranks behind an emulated link.")
    return "\n".join(lines)
