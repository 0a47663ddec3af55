"""Command line: run a program behind a slow link, check the link, or clean up after a killed run."""

import argparse
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from slow_link.launcher import MOST_RANKS
from slow_link.link import SlowLink
from slow_link.missing import enter_user_namespaces
from slow_link.namespaces import CONGESTION, sweep
from slow_link.ports import PRESETS, Port, amount, lines_of, ports_of
from slow_link.programs import program

USAGE = """%(prog)s [--rate RATE] [--delay DELAY] -- mpiexec -n P COMMAND ...
       %(prog)s [--rate RATE] [--delay DELAY] -- torchrun --nproc-per-node P SCRIPT ...
       %(prog)s [--rate RATE] [--delay DELAY] --ranks P -- COMMAND ...
       %(prog)s check [--rate RATE] [--delay DELAY] [--ranks P ...]
       %(prog)s sweep"""
NOT_STARTED, TOO_LONG, INTERRUPTED = 2, 124, 130
N = TypeVar("N", int, float)
RANK_HELP = (
    "ports of some ranks, again and again: 3:up=5mbit,down=50mbit,delay=30ms,jitter=5ms,loss=0.1%% or "
    f"0-2:PRESET, of {', '.join(PRESETS)}"
)


def fitting(kind: Callable[[str], N], fits: Callable[[N], bool], expected: str) -> Callable[[str], N]:
    """Parser of numbers that fit; ArgumentTypeError for anything else."""

    def parsed(text: str) -> N:
        with suppress(ValueError):
            if fits(value := kind(text)):
                return value
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")

    return parsed


EVEN = f"an even number of ranks from 2 to {MOST_RANKS}: ping-pong is played by two"
PLAYERS = fitting(int, lambda ranks: ranks in range(2, MOST_RANKS + 1, 2), EVEN)
REPEATS = fitting(int, lambda count: count >= 2, "a whole number of 2 or more")
TIME_LIMIT = fitting(float, lambda seconds: seconds > 0, "seconds above 0, such as 60")


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit status (2: not started, 124: past its time limit, 130: after Ctrl-C).

    As in a shell it is 128 + n of a rank that signal n has ended.
    """
    commands = {"check": check_command, "sweep": sweep_command}
    try:
        enter_user_namespaces()
        command = commands.get(argv[0]) if argv else None
        return command(argv[1:]) if command else run_command(argv)
    except (OSError, RuntimeError, ValueError) as error:  # of the machine, of the link, of what was asked for
        print(f"slow_link: {error}", file=sys.stderr)
        return NOT_STARTED
    except subprocess.TimeoutExpired as error:
        print(f"stopped: it did not end within {error.timeout:g} s", file=sys.stderr)
        return TOO_LONG
    except KeyboardInterrupt:
        print("slow_link: interrupted", file=sys.stderr)
        return INTERRUPTED


def sweep_command(argv: Sequence[str]) -> int:
    """Cleans up after killed runs."""
    argparse.ArgumentParser(prog="python -m slow_link sweep", description=sweep.__doc__).parse_args(argv)
    print(f"removed: {', '.join(sweep()) or 'nothing was left'}")
    return 0


def run_command(argv: Sequence[str]) -> int:
    """Starts COMMAND as real ranks, one in each namespace."""
    parser = argparse.ArgumentParser(prog="python -m slow_link", usage=USAGE, description=__doc__)
    parser.add_argument("--ranks", type=int, metavar="P", help="of a COMMAND that is started P times, env:// set")
    add_link(parser)
    parser.add_argument("--rank", action="append", default=[], metavar="RANKS:SETTINGS", help=RANK_HELP)
    parser.add_argument("--ports", type=Path, metavar="FILE", help="of lines as of --rank, which change them")
    parser.add_argument("--congestion", default=CONGESTION, metavar="NAME", help="TCP's, such as bbr; default reno")
    parser.add_argument("--timeout", type=TIME_LIMIT, default=math.inf, metavar="SECONDS", help="default: none")
    parser.add_argument("command", nargs="+", metavar="COMMAND", help="what runs, after --")
    options = parser.parse_args(argv)
    found = program(options.command, ranks=options.ranks)
    default = Port(up=options.rate, down=options.rate, delay=options.delay)
    lines = [*(lines_of(options.ports) if options.ports else []), *options.rank]
    ports = ports_of(lines, found.ranks, default) if found.ranks > 0 else None
    with SlowLink(ranks=found.ranks, ports=ports, congestion=options.congestion) as link:
        print(link.describe(), file=sys.stderr, flush=True)
        done = found.run(link, timeout=options.timeout)
    code = next((one.returncode for one in done if one.returncode), 0)
    return code if code >= 0 else 128 - code


def check_command(argv: Sequence[str]) -> int:
    """Compares measured times on the link with its model."""
    try:
        from slow_link.check import check, good
    except ModuleNotFoundError as error:
        print(f"slow_link: check needs {error.name}: `pip install slow-link[check]`", file=sys.stderr)
        return NOT_STARTED
    parser = argparse.ArgumentParser(prog="python -m slow_link check", description=check.__doc__)
    add_link(parser)
    parser.add_argument("--ranks", type=PLAYERS, nargs="+", default=[2, 4], metavar="P", help="even; default 2 4")
    parser.add_argument("--repeats", type=REPEATS, default=15, metavar="N", help="of each measurement; default 15")
    options = parser.parse_args(argv)
    link = {"mbit_per_second": options.rate, "milliseconds": options.delay}
    return 0 if good(check(**link, ranks=options.ranks, repeats=options.repeats)) else 1


def add_link(parser: argparse.ArgumentParser) -> None:
    """Adds the options --rate and --delay."""
    parser.add_argument("--rate", type=rate, default=100.0, metavar="RATE", help="of each port; default 100mbit")
    parser.add_argument("--delay", type=delay, default=1.0, metavar="DELAY", help="one way; default 1ms")


def rate(text: str) -> float:
    """Parses a rate into Mbit/s; ArgumentTypeError for anything but a positive rate."""
    value = _amount(text, "rate")
    if value <= 0:
        raise argparse.ArgumentTypeError(f"expected a rate above 0, got {text!r}")
    return value


def delay(text: str) -> float:
    """Parses a delay into milliseconds; ArgumentTypeError for anything else."""
    return _amount(text, "delay")


def _amount(text: str, kind: str) -> float:
    try:
        return amount(text, kind)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
