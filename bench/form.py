"""What all benchmarks' commands have in common: --full, --output, and what is known before they measure."""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.record import BEGAN, machine

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results"
QUICK = RESULTS / "quick"
MADE = ("bench/results", "docs", "*.md")
"""What benchmarks and `hatch run results` write: it says nothing of the code that was measured."""


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


def asked(
    parser: argparse.ArgumentParser, argv: Sequence[str], **defaults: tuple[Any, Any]
) -> tuple[argparse.Namespace, dict[str, Any]]:
    """The options, and the circumstances: the machine, the command, all options, the commit, the seeds, and the time.

    defaults: by option, what it is where it was not given: in the quick form, and with --full.
    """
    options = parser.parse_args(argv)
    options.output = options.output or (RESULTS if options.full else QUICK)
    for name, (quick, full) in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, full if options.full else quick)
    facts: dict[str, Any] = {**machine(), "command": " ".join([parser.prog, *argv]), "commit": commit()}
    facts["options"] = {name: _plain(value) for name, value in vars(options).items() if name != "output"}
    return options, facts | {"seeds": _seeds(options), BEGAN: datetime.now(UTC).isoformat(timespec="seconds")}


def _seeds(options: argparse.Namespace) -> list[int] | str:
    """Those that are used; where none is asked for, all that is drawn is drawn from a constant."""
    if hasattr(options, "seed"):
        return [options.seed]
    return list(range(options.seeds)) if hasattr(options, "seeds") else "constant, in the code"


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str | list | tuple | None) else str(value)


def commit() -> str:
    """The tree's, with a + where its code differs from it; "unknown" outside of git."""
    code = ["--", ".", *(f":(exclude){path}" for path in MADE)]
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        return head + ("+" if _git("status", "--porcelain", "--untracked-files=no", *code) else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
