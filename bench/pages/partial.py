"""What not waiting gains: of eager and cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.pages.marked import Records, prose, table

TASKS = {
    "digits": "digits, 16 ranks, one of them 0.32 s later than 0.5 s",
    "lstm": "LSTM, 8 ranks, sequences of 0.2 … 3.2 s",
    "speech": "speech, 8 ranks, a step as long as its utterances",
}
WAYS = ("synchronous", "majority", "solo")
KEPT = {
    "synchronous, restarts": "synchronous SGD with restarts keeps",
    "majority, restarts": "majority with restarts",
    "majority, grace, shrink": "majority with grace that goes on without the dead",
}


def eager(records: Records) -> str:
    """Every task but speech, which is a page's own."""
    return _table([row for row in records["eager"]["rows"] if row["task"] != "speech"])


def eager_speech(records: Records) -> str:
    """The app's."""
    return _table([row for row in records["eager"]["rows"] if row["task"] == "speech"])


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    return table(
        [
            {
                "task": TASKS[row["task"]],
                "way": row["how"],
                "to the accuracy, virtual s": f"{row['seconds']:.1f}",
                "speed-up": f"{row['speedup']:.2f}",
                "of the whole run": f"{row['whole_speedup']:.2f}",
                "ideal": f"{row['ideal']:.2f}",
                "accuracy at the end": f"{row['accuracy']:.1%}",
            }
            for row in rows
            if row["how"] in WAYS
        ]
    )


def cluster(records: Records) -> str:
    """The share of the throughput that is left."""
    shares = {row["how"]: row["share"] for row in records["cluster"]["rows"]}
    told = ", ".join(f"{words} {shares[how]:.0%}" for how, words in KEPT.items())
    return prose(f"Of the ideal throughput {told} ([rows](../../bench/results/cluster.csv)).")
