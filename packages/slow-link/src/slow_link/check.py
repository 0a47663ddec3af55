"""Self-check: is a link as slow as it says, and no slower?

Times are compared with α + β·bytes: α the delay one way, β = 8 / (bit/s) seconds per payload byte. IP and TCP headers
are not in β; they add 52 bytes to 1,448, or 3.6 %, to the time of long messages.

    ping-pong, one way   α + β·n
    allreduce            2·⌈log₂ P⌉·α + 2(P − 1)/P·n·β     (halving-doubling; a ring differs by a few α only)

`software` is the cost of the same number of messages without a link: the fastest of the shortest ping-pongs over
loopback TCP. A real network would add it too, so it is subtracted from the measured time. All ranks share this
machine's cores with each other and with whatever else runs, which makes some repeats late and none early, so the check
judges the lowest tenth of the repeats.
"""

import json
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from slow_link.launcher import Launcher
from slow_link.link import open_link
from slow_link.measure import PING_BYTES, SUM_BYTES, Found

TOLERANCE = 0.15
SECONDS_PER_LAUNCH = 120.0
"""Time limit of a launch, besides what its link takes."""
SHORT_SECONDS = 10.0
"""Most time that short ping-pongs take beyond those of `repeats`."""
COLUMNS = ("model ms", "least", "tenth", "median", "software", "tenth/model", "less software")
HEADER = f"{'P':>2} {'by':22}{'what':10}{'bytes':>10} {''.join(f'{name:>{len(name) + 3}}' for name in COLUMNS)}"


class Row(NamedTuple):
    """One measurement beside its modelled and its software time, in seconds."""

    ranks: int
    found: Found
    model: float
    software: float

    @property
    def tenth(self) -> float:
        """Time that a tenth of the repeats stay below, in seconds."""
        return statistics.quantiles(self.found.seconds, n=10, method="inclusive")[0]

    @property
    def ratio(self) -> float:
        """Measured time, less software, divided by the modelled time."""
        return (self.tenth - self.software) / self.model


def check(*, mbit_per_second: float, milliseconds: float, ranks: Sequence[int], repeats: int) -> list[Row]:
    """Measures and prints a table; `good` says whether every row is within the tolerance."""
    found: list[Row] = []
    for size in ranks:
        with open_link(ranks=size, mbit_per_second=mbit_per_second, milliseconds=milliseconds) as link:
            print(HEADER)
            for row in rows(link, repeats):
                print(_line(row), flush=True)
                found.append(row)
    print(f"{'' if good(found) else 'not '}all within {TOLERANCE:.0%}")
    return found


def good(found: Sequence[Row]) -> bool:
    """Whether every row is within the tolerance."""
    return all(abs(row.ratio - 1) <= TOLERANCE for row in found)


def rows(link: Launcher, repeats: int) -> Iterator[Row]:
    """Measures all rows of one link: over MPI first, then over gloo."""
    for kind in ("mpi", "gloo"):
        nowhere = _measured(Launcher(ranks=link.ranks), kind, repeats)
        software = {found.who: min(found.seconds) for found in nowhere if found.nbytes == PING_BYTES[0]}
        for found in _measured(link, kind, repeats):
            messages, _ = cost(found.what, found.nbytes, link.ranks)
            yield Row(link.ranks, found, modelled(found.what, found.nbytes, link), messages * software[found.who])


def cost(what: str, nbytes: int, ranks: int) -> tuple[int, float]:
    """Sequential messages and bytes that the model charges; the module's docstring has the formulas."""
    if what == "ping-pong":
        return 1, nbytes
    return 2 * math.ceil(math.log2(ranks)), 2 * (ranks - 1) / ranks * nbytes


def modelled(what: str, nbytes: int, link: Launcher) -> float:
    """Seconds that the model gives a measurement on this link."""
    messages, carried = cost(what, nbytes, link.ranks)
    return messages * link.alpha + carried * link.beta


def short_repeats(link: Launcher, repeats: int) -> int:
    """Repeats of a short ping-pong: twenty times as many where that takes little time."""
    often = 20 * repeats
    return max(repeats, min(often, int(SHORT_SECONDS / (2 * link.alpha)))) if link.alpha else often


def seconds_per_launch(link: Launcher, repeats: int) -> float:
    """Time limit: three times what the model gives bare calls and ours, and what else a launch may take."""
    pings = sum(2 * modelled("ping-pong", nbytes, link) for nbytes in PING_BYTES)
    return SECONDS_PER_LAUNCH + 3 * 2 * (repeats + 1) * (pings + modelled("allreduce", SUM_BYTES, link))


def _measured(link: Launcher, kind: str, repeats: int) -> list[Found]:
    """Measurements that rank 0 printed."""
    command = [sys.executable, "-m", "slow_link.measure", kind, str(repeats), str(short_repeats(link, repeats))]
    launch = link.mpiexec if kind == "mpi" else link.processes
    done = launch(command, timeout=seconds_per_launch(link, repeats))
    every = done if isinstance(done, list) else [done]
    for one in every:
        if one.returncode:
            raise RuntimeError(f"a rank over {kind} failed with status {one.returncode}:\n{one.stdout}{one.stderr}")
    return [Found(*json.loads(line)) for line in every[0].stdout.splitlines()]


def _line(row: Row) -> str:
    found = row.found
    times = (row.model, min(found.seconds), row.tenth, statistics.median(found.seconds), row.software)
    numbers = [*(f"{seconds * 1e3:.2f}" for seconds in times), f"{row.tenth / row.model:.2f}", f"{row.ratio:.2f}"]
    cells = "".join(f"{number:>{len(name) + 3}}" for name, number in zip(COLUMNS, numbers, strict=True))
    mark = "" if abs(row.ratio - 1) <= TOLERANCE else "  !"
    return f"{row.ranks:2} {found.who:22}{found.what:10}{found.nbytes:10,} {cells}{mark}"
