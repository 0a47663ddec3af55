"""The command `thinwire`: which way to train, whether this installation can, a slow network, and a view of a training.

    thinwire advise --parameters 25e6 --step-seconds 0.25 --link 1gbit --ranks 32
    thinwire doctor
    thinwire slow-link --rate 100mbit --delay 1ms -- torchrun --nproc-per-node 2 train.py
    thinwire top localhost:9464

Each has a --help of its own; `thinwire --version` says which this is. `python -m thinwire` is the same, for mpiexec and
torchrun.
"""

import os
import sys
from collections.abc import Sequence

from slow_link.__main__ import main as slow_link

from thinwire.advice.command import main as advise
from thinwire.doctor.command import main as doctor
from thinwire.top.command import main as top
from thinwire.version import __version__

COMMANDS = {"advise": advise, "doctor": doctor, "slow-link": slow_link, "top": top}


def main(argv: Sequence[str]) -> int:
    """Runs the command that is named first; returns its exit status, 2 where there is none of that name."""
    name, *given = argv or ["--help"]
    if name in COMMANDS:
        return COMMANDS[name](given)
    if name == "--version":
        print(f"thinwire {__version__}")
        return 0
    wrong = name not in ("-h", "--help")
    said = f"thinwire: {name!r} given, expected one of {', '.join(COMMANDS)}\n" if wrong else ""
    print(f"{said}{__doc__}", end="", file=sys.stderr if wrong else sys.stdout)
    return 2 if wrong else 0


def command() -> int:
    """Entry point of the installed script."""
    try:
        status = main(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough, as `head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left would fail at exit
        return 141
    return status


if __name__ == "__main__":
    sys.exit(command())
