"""Command lines as typed, taken apart so that each of their ranks can be started in its place on the link.

Each rank becomes a machine of its own. `mpiexec -n 4 X` becomes one mpiexec with four sections; `torchrun
--nproc-per-node 4 X` becomes four nodes of one process; any other command X becomes P processes, as asked for, with the
variables of env://.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any, NamedTuple

from slow_link.launcher import find_mpiexec

MPIEXEC = ("mpiexec", "mpirun", "mpiexec.hydra")
COUNT = {"-n": 1, "-np": 1}
SECTIONS = {"-env": 2, "-wdir": 1}
LENGTHS = (
    COUNT | SECTIONS | {"-genv": 2, "-genvall": 0, "-genvlist": 1, "-genvnone": 0, "-l": 0, "-prepend-rank": 0, "-v": 0}
)
"""Options of MPICH's mpiexec before the program, and how many words follow: of one section, of all of them."""

PLACES = {"nnodes", "node-rank", "master-addr", "master-port", "rdzv-backend", "rdzv-endpoint", "rdzv-id"}
KEPT = {"max-restarts", "monitor-interval", "start-method", "role", "log-dir", "redirects", "tee", "r", "t"}
FLAGS = {"m", "module", "no-python", "run-path"}
"""Options of torchrun before the script: PLACES, of nodes, are refused; KEPT take a value, FLAGS take none."""


class Program(NamedTuple):
    """Command of `ranks` processes. run: (link, timeout in seconds) -> the result of each process started here."""

    ranks: int
    run: Callable[..., list[CompletedProcess[str]]]


def program(words: Sequence[str], *, ranks: int | None) -> Program:
    """Parses a command line.

    ranks: for commands that do not say it themselves. ValueError where the two disagree, or neither says it.
    """
    name = Path(words[0]).name
    if name in MPIEXEC:
        found = _mpiexec(list(words))
    elif name == "torchrun":
        found = _torchrun(list(words[:1]), list(words[1:]))
    elif list(words[1:3]) == ["-m", "torch.distributed.run"]:
        found = _torchrun(list(words[:3]), list(words[3:]))
    elif ranks is None:
        raise ValueError(f"--ranks P is missing: {name} is neither mpiexec nor torchrun, which say it themselves")
    else:
        found = Program(ranks, lambda link, timeout: link.processes(words, timeout=timeout, capture=False))
    if ranks not in (None, found.ranks):
        raise ValueError(f"--ranks {ranks} was given, and {name} is asked for {found.ranks}: leave --ranks out")
    return found


def _mpiexec(words: list[str]) -> Program:
    ranks, section, start, rest = 0, list[str](), [find_mpiexec(words[0])], words[1:]
    while rest and rest[0].startswith("-"):
        option = "-" + rest[0].lstrip("-")
        if option not in LENGTHS:
            raise ValueError(f"{words[0]} {rest[0]}: options that can be passed on are {', '.join(LENGTHS)}")
        taken, rest = rest[: 1 + LENGTHS[option]], rest[1 + LENGTHS[option] :]
        if option in COUNT:
            ranks = _count(taken)
        else:
            (section if option in SECTIONS else start).extend(taken)
    if not ranks or not rest or ":" in rest:
        raise ValueError(f"expected {words[0]} -n P COMMAND ..., one command for all ranks; got {' '.join(words)}")
    how: dict[str, Any] = {"mpiexec": start, "section": section, "capture": False}
    return Program(ranks, lambda link, timeout: [link.mpiexec(rest, timeout=timeout, **how)])


def _torchrun(start: list[str], rest: list[str]) -> Program:
    ranks, kept, typed = 0, list(start), " ".join([*start, *rest])
    while rest and rest[0].startswith("-"):
        option, equals, value = rest[0].partition("=")
        name = option.lstrip("-").replace("_", "-")
        length = 1 if equals or name in {"standalone", *FLAGS} else 2
        taken, rest = rest[:length], rest[length:]
        given = [option, value] if equals else taken
        if name == "nproc-per-node":
            ranks = _count(given)
        elif name in KEPT | FLAGS:
            kept += taken
        elif name in PLACES and (name, given[1:]) != ("nnodes", ["1"]):
            raise ValueError(
                f"{start[0]} {' '.join(given)}: every rank is a node of its own here, at an address that the link "
                "chooses; ask for P ranks by --nproc-per-node P alone"
            )
        elif name not in {"standalone", *PLACES}:
            raise ValueError(f"{start[0]} {option}: not known here, so not known whether a word belongs to it")
    if not ranks or not rest:
        raise ValueError(f"expected {start[0]} --nproc-per-node P SCRIPT ..., got {typed}")
    return Program(ranks, lambda link, timeout: link.torchrun(rest, timeout=timeout, capture=False, torchrun=kept))


def _count(words: list[str]) -> int:
    if len(words) != 2 or not words[1].isdecimal() or int(words[1]) < 1:
        raise ValueError(f"expected {words[0]} P with P a whole number from 1, got {' '.join(words)}")
    return int(words[1])
