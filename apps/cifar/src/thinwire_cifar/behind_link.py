"""An epoch of the demo behind an emulated slow link, where this machine can emulate one: see `slow_link`."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from thinwire_trainer.launching.placement import joined, placement
from thinwire_trainer.launching.workers import find_mpiexec, worker_environment

RATE_MBIT, DELAY_MS = 100, 1
LONGEST = 40  # seconds that it may take, torch's start included; on an idle machine it is a third


def measured(ranks: int) -> Mapping[str, Mapping[str, float]] | str:
    """Seconds of a step by algorithm, "measured" and "predicted"; or why there is nothing."""
    if importlib.util.find_spec("slow_link") is None:
        return "`slow_link`, which emulates one, is not installed: pip install thinwire-cifar[link]"
    from communicators import Link
    from thinwire_trainer.records.metrics import read_metrics
    from thinwire_trainer.records.run_folder import RunFolder

    from thinwire_cifar.comparison import ALGORITHMS, predicted, summarise

    with TemporaryDirectory() as folder:
        link = ["--rate", f"{RATE_MBIT}mbit", "--delay", f"{DELAY_MS}ms", "--timeout", str(LONGEST)]
        trains = [sys.executable, "-m", "thinwire_cifar.behind_link", folder]
        command = [sys.executable, "-m", "slow_link", *link, "--", find_mpiexec(), "-n", str(ranks), *trains]
        environment = worker_environment()
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
        )
        if done.returncode:
            said = (done.stderr or done.stdout).strip().splitlines() or ["nothing was said"]
            return f"{said[-1].removeprefix('slow_link: ')} (status {done.returncode})"
        runs = {name: RunFolder(Path(folder, name)) for name in ALGORITHMS}
        summaries = {name: summarise(read_metrics(run.metrics.path), images=1) for name, run in runs.items()}
        numel = runs["dense"].recorded()["parameters"]
    steps = predicted(summaries, Link(alpha=1e-3 * DELAY_MS, beta=8e-6 / RATE_MBIT), numel=numel, size=ranks)
    return {name: {"measured": each.step, "predicted": steps[name].step} for name, each in summaries.items()}


def on_rank(folder: Path) -> None:
    """Train an epoch with each algorithm; one rank's part, under mpiexec behind the link."""
    from thinwire_trainer.comparison import compared
    from thinwire_trainer.launching.device import own_device

    from thinwire_cifar.__main__ import APP
    from thinwire_cifar.comparison import ALGORITHMS

    place = placement(os.environ)
    flags = {name: [*own, "--max-epochs=1", "--checkpoint-every=0"] for name, own in ALGORITHMS.items()}
    with joined(place) as comm:
        compared(APP, flags, folder, comm, device=own_device(place.local_rank, "cpu"))


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


if __name__ == "__main__":
    on_rank(Path(sys.argv[1]))
