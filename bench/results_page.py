"""docs/results.md, and marked blocks of other pages, of bench/results: `hatch run results`; --run: of new records.

    python -m bench.results_page [--run] [--only NAME ...] [--check]

--run: makes the records first, every benchmark of the page in full, one after another, on a machine with nothing else
to do; with --only those alone. Verdicts of the page that change are printed, so that two runs can be compared.
--check: writes no page, and ends with 1 if a page is not what the records make. Templates: `bench.pages`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from jinja2 import UndefinedError

from bench.form import RESULTS, ROOT
from bench.pages import BLOCKS, BUSY, NotOnRecordError, Records, filled, pages, rendered

PAGE = ROOT / "docs" / "results.md"
PICTURES = ROOT / "docs" / "images" / "results"
MEASURED = ("demo", "collectives", "local-sgd", "partial", "overlap", "predictions", "slow-link", "compress", "peers")
SHOWN = ("scaling", "eager", "sweeps", *MEASURED)
"""Records of the page: simulated ones first, which a busy machine spoils least."""
VERDICT = re.compile(r"^\| \[(?P<title>[^\]]+)\]\(#.*\*\*(?P<ours>.*)\*\* \|.*\| (?P<verdict>[^|]*) \|$", re.M)


def main(argv: Sequence[str] = ()) -> int:
    """Writes the pages; returns the exit status."""
    options = _options(argv)
    failed = remade(options.only or SHOWN) if options.run else []
    records = {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}
    before = PAGE.read_text()
    made, lacking = changed(records)
    print("\n".join(differences(before, made.get(PAGE, before)) or ["no verdict of the page changes"]))
    for path, missing in lacking.items():
        print(f"{path.relative_to(ROOT)} is kept as it is: {missing}")
    for path, text in made.items():
        if options.check:
            print(f"not what the records make: {path.relative_to(ROOT)}; run `hatch run results`")
        else:
            path.write_text(text)
            print(f"written: {path.relative_to(ROOT)}")
    if not options.check:
        PICTURES.mkdir(parents=True, exist_ok=True)
        for name in SHOWN:
            shutil.copyfile(RESULTS / f"{name}.png", PICTURES / f"{name}.png")
    return 1 if lacking or failed or (made and options.check) else 0


def _options(argv: Sequence[str]) -> argparse.Namespace:
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m bench.results_page", description=summary)
    parser.add_argument("--run", action="store_true", help="make the records first")
    parser.add_argument("--only", nargs="+", choices=SHOWN, metavar="NAME", help=f"of these: {', '.join(SHOWN)}")
    parser.add_argument("--check", action="store_true", help="only tell whether pages are what the records make")
    options = parser.parse_args(argv)
    if options.only and not options.run:
        parser.error("--only says which records --run makes; give both")
    return options


def changed(records: Records) -> tuple[dict[Path, str], dict[Path, str]]:
    """Pages that are not what the records make, as they are to be; and pages that lack a figure: which.

    Raises:
        ValueError: if a page has a wrong mark.
    """
    makers: dict[Path, Callable[[str], str]] = {
        path: partial(filled, records=records, blocks=BLOCKS, page=str(path.relative_to(ROOT))) for path in pages()
    }
    makers[PAGE] = lambda text: rendered("results", records)
    made: dict[Path, str] = {}
    lacking: dict[Path, str] = {}
    for path, make in makers.items():
        before = path.read_text()
        try:
            after = make(before)
        except (NotOnRecordError, UndefinedError) as missing:
            lacking[path] = str(missing)
        else:
            made |= {path: after} if after != before else {}
    return made, lacking


def verdicts(page: str) -> dict[str, tuple[str, str]]:
    """Verdict and figures of each headline of docs/results.md, by title."""
    return {found["title"]: (found["verdict"], found["ours"]) for found in VERDICT.finditer(page)}


def differences(before: str, after: str) -> list[str]:
    """A line for each verdict that differs between two versions of the page, or is on one alone."""
    old, new, none = verdicts(before), verdicts(after), ("not on the page", "")
    return [
        f"{title}: {' '.join(old.get(title, none)).strip()}, now {' '.join(new.get(title, none)).strip()}"
        for title in dict.fromkeys([*old, *new])
        if old.get(title, none)[0] != new.get(title, none)[0]
    ]


def remade(names: Sequence[str]) -> list[str]:
    """Runs benchmarks in full, one after another; those that left no new record.

    A benchmark's exit status tells whether it found what was expected; here only its record counts.
    """
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > BUSY * cores:
        print(
            f"the machine is busy (load average {load:.1f} on {cores} cores): seconds will be other ones than on an "
            "idle one, most of all those of MPI's ranks, which wait in a loop. Do not commit such records."
        )
    before = {name: path.read_bytes() if (path := RESULTS / f"{name}.json").exists() else b"{}" for name in names}
    took = {name: json.loads(old).get("circumstances", {}).get("seconds", 0) for name, old in before.items()}
    print(f"{len(names)} benchmarks, {sum(took.values()) / 60:.0f} minutes the last time", flush=True)
    failed = []
    for number, name in enumerate(names, 1):
        print(f"\n[{number}/{len(names)}] {name}: {took[name] / 60:.1f} minutes the last time", flush=True)
        began, path = time.time(), RESULTS / f"{name}.json"
        status = subprocess.run([sys.executable, "-m", "bench", name, "--full"], cwd=ROOT).returncode
        new = path.exists() and path.read_bytes() != before[name]  # it tells when it began
        found = "its record is new" if new else "no new record, the old one is kept"
        print(f"{name}: {found}; exit status {status}, {time.time() - began:.0f} s", flush=True)
        failed += [] if new else [name]
    return failed


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
