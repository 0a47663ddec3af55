"""The command: run something behind a slow link, check the link, or sweep up after a killed run."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.slow_link import open_link, sweep
from bench.slow_link.check import check

USAGE = """%(prog)s --ranks P --mbit RATE --ms DELAY [--mpi | --gloo] -- COMMAND ...
       %(prog)s check [--mbit RATE] [--ms DELAY] [--ranks P ...]
       %(prog)s sweep"""


def main(argv: Sequence[str]) -> int:
    """Returns the exit status."""
    if argv[:1] == ["check"]:
        return check_command(argv[1:])
    if argv[:1] == ["sweep"]:
        print(f"removed: {', '.join(sweep()) or 'nothing was left'}")
        return 0
    return run_command(argv)


def run_command(argv: Sequence[str]) -> int:
    """Starts COMMAND as real ranks, one in each namespace."""
    parser = argparse.ArgumentParser(prog="python -m bench.slow_link", usage=USAGE, description=__doc__)
    parser.add_argument("--ranks", type=int, default=2, metavar="P", help="default 2")
    _add_link(parser)
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--mpi", action="store_true", help="by mpiexec (default)")
    kind.add_argument("--gloo", action="store_true", help="one process a rank, with the variables of env:// set")
    parser.add_argument("--timeout", type=float, default=3600.0, metavar="SECONDS", help="default 3600")
    parser.add_argument("command", nargs="+", metavar="COMMAND", help="what every rank runs, after --")
    options = parser.parse_args(argv)
    with open_link(ranks=options.ranks, mbit_per_second=options.mbit, milliseconds=options.ms) as link:
        launch = link.processes if options.gloo else link.mpiexec
        try:
            done = launch(options.command, timeout=options.timeout, capture=False)
        except subprocess.TimeoutExpired:
            print(f"stopped: it did not end within {options.timeout:g} s", file=sys.stderr)
            return 124
    return next((one.returncode for one in (done if isinstance(done, list) else [done]) if one.returncode), 0)


def check_command(argv: Sequence[str]) -> int:
    """Compares the link with its model."""
    parser = argparse.ArgumentParser(prog="python -m bench.slow_link check", description=check.__doc__)
    _add_link(parser)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], metavar="P", help="even; default 2 4")
    parser.add_argument("--repeats", type=int, default=15, metavar="N", help="of each measurement; default 15")
    parser.add_argument("--full", dest="repeats", action="store_const", const=60, help="60 repeats")
    parser.add_argument("--output", type=Path, metavar="DIR", help="write DIR/slow-link.csv, .json and .png too")
    options = parser.parse_args(argv)
    if any(size % 2 for size in options.ranks):
        parser.error("ping-pong is played by two: --ranks must be even")
    good = check(
        mbit_per_second=options.mbit,
        milliseconds=options.ms,
        ranks=tuple(options.ranks),
        repeats=options.repeats,
        output=options.output,
    )
    return 0 if good else 1


def _add_link(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mbit", type=float, default=100.0, metavar="RATE", help="Mbit/s of each port; default 100")
    parser.add_argument("--ms", type=float, default=1.0, metavar="DELAY", help="milliseconds one way; default 1")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
