"""The share of its ideal throughput that a cluster keeps, where ranks hang, are slow for a while, and die.

    python -m bench cluster [--ranks P] [--hours H] [--seeds N] [--full] [--output DIR]

By the model of `bench.cluster_model`, which says what is drawn from what, and what is not modelled: 256 ranks, steps of
5 s, of which 2 % take longer by 2.5 s in the mean; a rank is slow for an hour every 100 hours, and dies every 1,000
hours, so that one of all dies every 4. share: gradients that were kept, against ranks that never wait, are late or die:
median and extremes of the seeds. contributors: of a round, of all ranks. After a death the ways with "restarts" begin
again at the last checkpoint; those with "shrink" go on with who is left, and write a checkpoint every hour only. grace:
as long as a round's collective takes. Nothing of this tells how well is learnt: see `bench eager`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from partial_collectives.protocol.rules import Rules

from bench.cluster_model import Cluster
from bench.record import asked, parser_of, record

AGAINST = "ranks that never wait, are late or die"


def main(argv: Sequence[str] = ()) -> int:
    """Prints the table; returns the exit status."""
    parser = parser_of("cluster", __doc__, full="ten times as many hours")
    parser.add_argument("--ranks", type=int, default=256, help="default 256")
    parser.add_argument("--hours", type=float, help="of the virtual clock; default 24, with --full 240")
    parser.add_argument("--seeds", type=int, default=3, help="default 3")
    options = asked(parser, argv, hours=(24.0, 240.0))
    rows: list[dict[str, Any]] = []
    for how, cluster in ways(options.ranks).items():
        shares, brought = zip(*(cluster.shares(options.hours, seed) for seed in range(options.seeds)), strict=True)
        row = {"how": how, "share": statistics.median(shares), "least": min(shares), "most": max(shares)}
        rows.append({**row, "share_samples": list(shares), "contributors": statistics.median(brought)})
        spread = f"{row['share']:.1%} [{row['least']:.1%}, {row['most']:.1%}]"
        print(f"{how:>25}: {spread} of the throughput, {statistics.median(brought):.1%} in a round", flush=True)
    record(options, rows, labels=("how",), values=("share", "contributors"), against=AGAINST)
    return 0


def ways(ranks: int) -> dict[str, Cluster]:
    """By name."""
    synchronous = Cluster(ranks, Rules(quorum=ranks, max_staleness=0))
    majority = replace(synchronous, rules=Rules())
    return {
        "synchronous, restarts": synchronous,
        "majority, restarts": majority,
        "majority, grace, restarts": replace(majority, grace=synchronous.costs.round),
        "majority, shrink": replace(majority, shrinks=True),
        "majority, grace, shrink": replace(majority, grace=synchronous.costs.round, shrinks=True),
    }
