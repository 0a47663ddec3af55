"""The command: find out, report."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from sparse_collectives.advise.flags import parse
from sparse_collectives.advise.plot import plot
from sparse_collectives.advise.report import as_json, as_text
from sparse_collectives.advise.situation import NoAdvice, find_out


def main(argv: Sequence[str]) -> int:
    """Prints the advice on rank 0; returns the exit status, 2 where flags or surroundings make no sense."""
    flags = parse(argv)
    try:
        situation, comm = find_out(flags)
        if comm.rank == 0:
            print(as_json(situation) if flags.json else as_text(situation))
            if flags.plot:
                plot(situation, flags.plot)
    except NoAdvice as reason:
        print(f"python -m sparse_collectives.advise: {reason}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
