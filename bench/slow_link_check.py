"""Is the emulated link as slow as it says, and no slower? `slow_link.check` compares it with its model.

    python -m bench slow-link [--rate RATE] [--delay DELAY] [--ranks P ...] [--repeats N] [--full] [--output DIR]

Times are of one message, or of one allreduce; software: what as many messages cost where no link is. See `slow_link`.
"""

from collections.abc import Sequence
from typing import Any

from slow_link.__main__ import add_link
from slow_link.check import Row, check, good

from bench.record import asked, parser_of, record

AGAINST = "α + β·bytes of the same link, and the same over loopback"


def main(argv: Sequence[str] = ()) -> int:
    """Prints the table; the exit status is 1 where a time is not within the tolerance."""
    parser = parser_of("slow-link", __doc__, full="60 repeats")
    add_link(parser)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], metavar="P", help="even; default 2 4")
    parser.add_argument("--repeats", type=int, metavar="N", help="of each measurement; default 15, with --full 60")
    options = asked(parser, argv, repeats=(15, 60))
    link = {"mbit_per_second": options.rate, "milliseconds": options.delay}
    found = check(**link, ranks=options.ranks, repeats=options.repeats)
    labels, values = ("P", "by", "what", "bytes"), ("measured_less_software_to_model",)
    rows = [_row(row) for row in found]
    record(options, rows, labels=labels, values=values, against=AGAINST)
    return 0 if good(found) else 1


def _row(row: Row) -> dict[str, Any]:
    cells: dict[str, Any] = {"P": row.ranks, "by": row.found.who, "what": row.found.what, "bytes": row.found.nbytes}
    cells |= {"model_ms": 1e3 * row.model, "measured_ms": 1e3 * row.tenth, "software_ms": 1e3 * row.software}
    cells |= {"measured_less_software_to_model": row.ratio}
    return {**cells, "ms_samples": [1e3 * seconds for seconds in row.found.seconds]}
