"""Whether other programs had the cores while this measured."""

from __future__ import annotations

import time
from collections.abc import Callable

from communicators import Communicator, barrier

from sparse_collectives.prediction.calibration import slowest

PROBE_SECONDS = 0.1
BUSY = 0.1
"""A share of the time from which on it is said: by as much are times too long."""


def share_taken(
    comm: Communicator,
    *,
    clock: Callable[[], float] = time.perf_counter,
    cpu: Callable[[], float] = time.thread_time,
) -> float:
    """Of a moment in which all ranks do nothing but compute, the share in which the scheduler let others run; 0 … 1.

    Collective; of the rank that was held up most. Load averages lag by a minute and count one's own ranks; this counts
    what a measurement suffers: other programs, too small a quota of a container, more ranks than cores. Programs on
    other cores do not count.
    """
    barrier(comm)
    begin, had = clock(), cpu()
    while clock() - begin < PROBE_SECONDS:
        pass
    wall, run = clock() - begin, cpu() - had
    return slowest([max(0.0, 1 - run / wall)], comm)[0]
