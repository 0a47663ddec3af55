"""Checks whether other programs used the cores during the measurement."""

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
    """Share of time, 0 … 1, for which the scheduler let others run while all ranks did nothing but compute.

    Collective; returns the share of the rank that was held up most. Load averages lag by a minute and count our own
    ranks; this counts what disturbs a measurement: other programs, a container's quota that is too small, more ranks
    than cores. Programs on other cores do not count.
    """
    barrier(comm)
    begin, had = clock(), cpu()
    while clock() - begin < PROBE_SECONDS:
        pass
    wall, run = clock() - begin, cpu() - had
    return slowest([max(0.0, 1 - run / wall)], comm)[0]
