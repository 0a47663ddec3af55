"""What all benchmarks' commands have in common: --full, --output, and what is known before they measure."""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.record import machine

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results"
QUICK = RESULTS / "quick"


def parser_of(name: str, doc: str | None, *, full: str) -> argparse.ArgumentParser:
    """For `python -m bench NAME`, with the options that every benchmark has.

    doc: the module's, of which the first line is shown. full: what --full means here.
    """
    summary = (doc or "").strip().partition("\n")[0]
    made = argparse.ArgumentParser(prog=f"python -m bench {name}", description=summary)
    made.add_argument("--full", action="store_true", help=full)
    made.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help=f"where {name}.csv, .json and .png are written; default bench/results/quick, with --full bench/results",
    )
    return made


def asked(parser: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[argparse.Namespace, dict[str, Any]]:
    """The options, and the circumstances: the machine, the command, the commit and the seed, where one is asked for."""
    options = parser.parse_args(argv)
    options.output = options.output or (RESULTS if options.full else QUICK)
    facts: dict[str, Any] = {**machine(), "command": " ".join([parser.prog, *argv]), "commit": commit()}
    return options, facts | {name: value for name, value in vars(options).items() if name in ("seed", "seeds")}


def commit() -> str:
    """The tree's, with a + where files differ from it; "unknown" outside of git."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()
