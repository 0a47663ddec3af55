"""What `hatch run results --run` does: the records of the page anew, one benchmark after another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.form import RESULTS, ROOT

BUSY = 1.0
"""Load average a core, before anything is measured; a benchmark that has just ended leaves some, too."""


def remake(names: Sequence[str]) -> list[str]:
    """Runs them in full, tells what it does and how long that took for the records there are; those that failed.

    A benchmark's exit status says whether it found what was expected: what counts here is whether it left a record.
    """
    _tell_if_busy()
    known = {name: _seconds(name) for name in names}
    print(f"{len(names)} benchmarks, {_told(list(known.values()))}:")
    for name, seconds in known.items():
        print(f"  {name}: {_told([seconds])}")
    others = sorted(path.stem for path in RESULTS.glob("*.json") if path.stem not in names)
    print(f"kept as they are, `python -m bench NAME --full` makes them: {', '.join(others)}", flush=True)
    failed = []
    for number, name in enumerate(names, 1):
        print(f"\n[{number}/{len(names)}] {name}: {_told([known[name]])}", flush=True)
        if not _remade(name):
            failed.append(name)
    return failed


def _tell_if_busy() -> None:
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > BUSY * cores:
        print(
            f"the machine is busy (load average {load:.1f} on {cores} cores): seconds will be other ones than on an "
            "idle one. MPI's ranks, which wait in a loop, suffer most, and what is compared with them looks fast. Such "
            "records are not to be committed."
        )


def _remade(name: str) -> bool:
    """Whether there is a new record."""
    path, began = RESULTS / f"{name}.json", time.time()
    before = path.read_bytes() if path.exists() else None
    status = subprocess.run([sys.executable, "-m", "bench", name, "--full"], cwd=ROOT).returncode
    new = path.exists() and path.read_bytes() != before  # it tells when it began
    unlike = "not all that it found is as expected" if new else "something failed"
    found = "as expected" if status == 0 else f"ended with status {status}: {unlike}"
    record = "its record is new" if new else "it left no record, and the one there was is kept"
    print(f"{name}: {found}; {record}; {time.time() - began:.0f} s", flush=True)
    return new


def _seconds(name: str) -> int | None:
    path: Path = RESULTS / f"{name}.json"
    found = json.loads(path.read_text())["circumstances"] if path.exists() else {}
    seconds: int | None = found.get("seconds")
    return seconds


def _told(seconds: Sequence[int | None]) -> str:
    """What they take together."""
    given = [one for one in seconds if one is not None]
    unknown = len(seconds) - len(given)
    words = [f"{sum(given) / 60:.1f} minutes"] * bool(given) + [f"{unknown} of unknown length"] * bool(unknown)
    return " and ".join(words)
