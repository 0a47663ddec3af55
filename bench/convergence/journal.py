"""The record of trainings that have ended, a line each, so that none is made twice."""

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.convergence.training import trained
from bench.convergence.ways import Run

Found = dict[str, Any]
"""The fields of a `Run`, and what `trained` found."""


def ended(runs: Iterable[Run], folder: Path) -> list[Found]:
    """Each of these trainings, from the record or made now, when it is written down."""
    known, found, runs = on_record(folder), [], list(runs)
    for number, run in enumerate(runs, 1):
        if not is_whole(known.get(key(run))):
            known[key(run)] = made = {**asdict(run), **trained(run)}
            _keep(folder, made)
            print(f"{number}/{len(runs)}  {key(run)}  {made['score']:.2f}", flush=True)
        found.append(known[key(run)])
    return found


def on_record(folder: Path) -> dict[str, Found]:
    """Trainings that have ended, by `key`; the last line may have been cut off."""
    if not _journal(folder).exists():
        return {}
    found = {}
    for line in _journal(folder).read_text().splitlines():
        try:
            one = json.loads(line)
        except ValueError:
            continue
        found[key(one)] = one
    return found


def key(run: Run | Found) -> str:
    """What tells a training from others, in words."""
    values = asdict(run) if isinstance(run, Run) else run
    return "  ".join(str(values[name]) for name in Run.__dataclass_fields__)


def is_whole(found: Found | None) -> bool:
    """Whether bytes and messages on the way are there, which the first records lack."""
    return found is not None and all(len(point) == 4 for point in found["curve"])


def _keep(folder: Path, found: Found) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with _journal(folder).open("a") as file:
        file.write(json.dumps(found) + "\n")


def _journal(folder: Path) -> Path:
    return folder / "convergence-runs.jsonl"
