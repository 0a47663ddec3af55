"""The command: find out, report."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence

from communicators import Communicator

from sparse_collectives.advise.all_or_none import NoAdvice, all_or_none
from sparse_collectives.advise.flags import parse
from sparse_collectives.advise.plot import check_plot, plot
from sparse_collectives.advise.report import as_json, as_text
from sparse_collectives.advise.situation import find_out, join


def main(argv: Sequence[str]) -> int:
    """Prints the advice on rank 0; returns the exit status, 2 where flags or surroundings make no sense."""
    flags, comm = parse(argv), None
    try:
        comm = join(flags)
        _advise(flags, comm)
    except NoAdvice as reason:
        if comm is None or comm.rank == 0:
            _say(str(reason))
        return 2
    return 0


def _advise(flags: Namespace, comm: Communicator) -> None:
    """Prints the advice on stdout and reports progress on stderr. Raises NoAdvice."""
    say = _say if comm.rank == 0 else _be_silent
    if flags.plot:
        all_or_none(lambda: check_plot(flags.plot) if comm.rank == 0 else None, comm)
    situation = find_out(flags, comm, say)
    if comm.rank != 0:
        return
    say(f"predicting steps of {situation.ranks} ranks")
    print(as_json(situation) if flags.json else as_text(situation))
    if flags.plot:
        say(f"drawing {flags.plot}")
        plot(situation, flags.plot)


def _say(text: str) -> None:
    print(f"python -m sparse_collectives.advise: {text}", file=sys.stderr, flush=True)


def _be_silent(text: str) -> None:
    del text


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
