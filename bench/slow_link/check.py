"""The self-check: is a link as slow as it says, and no slower?

Times are compared with α + β·bytes: α the delay one way, β = 8 / (bit/s) seconds per payload byte. IP and TCP headers
are not in β; they add 52 bytes to 1,448, or 3.6 %, to what long messages should take. Models, per rank:

    ping-pong, one way   α + β·n
    allreduce            2·⌈log₂ P⌉·α + 2(P − 1)/P·n·β     (halving-doubling; a ring differs by a few α only)

The ranks share this machine's cores with each other and with whatever else runs: so the lower quartile of some
repeats is judged, and the least and the median stand beside it.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
from collections.abc import Iterator
from typing import NamedTuple

from bench.slow_link.fallback import open_link
from bench.slow_link.launcher import Launcher

TOLERANCE = 0.15
SECONDS_PER_LAUNCH = 120.0


class Row(NamedTuple):
    """Times in seconds. least, quartile, median: measured; model: α + β·bytes."""

    ranks: int
    who: str
    what: str
    nbytes: int
    model: float
    least: float
    quartile: float
    median: float

    @property
    def good(self) -> bool:
        """Whether the lower quartile is within the tolerance."""
        return abs(self.quartile / self.model - 1) <= TOLERANCE


COLUMNS = ("model ms", "least", "quartile", "median")
HEADER = f"{'P':>2} {'by':22}{'what':11}{'bytes':>10}{''.join(f'{name:>10}' for name in COLUMNS)}  quartile/model"


def check(*, mbit_per_second: float, milliseconds: float, ranks: tuple[int, ...], repeats: int) -> bool:
    """Measures and prints a table; whether all rows are within the tolerance."""
    good = True
    for size in ranks:
        with open_link(ranks=size, mbit_per_second=mbit_per_second, milliseconds=milliseconds) as link:
            print(HEADER)
            for row in rows(link, repeats):
                print(_line(row), flush=True)
                good &= row.good
    print(f"within {TOLERANCE:.0%}" if good else f"not all within {TOLERANCE:.0%}")
    return good


def rows(link: Launcher, repeats: int) -> Iterator[Row]:
    """Everything that is measured on one link: over MPI, then over gloo."""
    for kind in ("mpi", "gloo"):
        for line in _measured(link, kind, repeats).splitlines():
            found = json.loads(line)
            seconds = found["seconds"]
            quartile = statistics.quantiles(seconds, n=4, method="inclusive")[0]
            yield Row(
                link.ranks,
                f"{found['who']}, {kind}" if found["who"] == "communicators" else found["who"],
                found["what"],
                found["nbytes"],
                model(found["what"], found["nbytes"], link),
                min(seconds),
                quartile,
                statistics.median(seconds),
            )


def model(what: str, nbytes: int, link: Launcher) -> float:
    """Seconds that α + β·bytes expects, see the top of this page."""
    if what == "ping-pong":
        return link.alpha + link.beta * nbytes
    rounds = 2 * math.ceil(math.log2(link.ranks))
    return rounds * link.alpha + 2 * (link.ranks - 1) / link.ranks * nbytes * link.beta


def _measured(link: Launcher, kind: str, repeats: int) -> str:
    """What rank 0 printed."""
    command = [sys.executable, "-m", "bench.slow_link.measure", kind, str(repeats)]
    done: subprocess.CompletedProcess[str]
    if kind == "mpi":
        every = [link.mpiexec(command, timeout=SECONDS_PER_LAUNCH)]
    else:
        every = link.processes(command, timeout=SECONDS_PER_LAUNCH)
    for done in every:
        if done.returncode:
            raise RuntimeError(f"a rank over {kind} failed with status {done.returncode}:\n{done.stdout}{done.stderr}")
    return every[0].stdout


def _line(row: Row) -> str:
    times = "".join(f"{seconds * 1e3:10.2f}" for seconds in (row.model, row.least, row.quartile, row.median))
    ratio = f"{row.quartile / row.model:8.2f}{'' if row.good else '  !'}"
    return f"{row.ranks:2} {row.who:22}{row.what:11}{row.nbytes:10,}{times}{ratio}"
