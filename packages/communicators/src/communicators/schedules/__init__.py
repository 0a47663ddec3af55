"""Dense collectives as schedules, and what schedules are made of: `from communicators import schedules`.

`run(schedules.allreduce(x, comm.rank, comm.size), comm)` runs one at once; within another schedule it is
`yield from schedules.allreduce(x, rank, size)`.
"""

from communicators.schedule import among, largest_power_of_two, powers_of_two
from communicators.schedules.by_rate import by_rate_allreduce, check_shares, shares_by_rate
from communicators.schedules.dense import (
    RING_NBYTES,
    allgather,
    allgather_blocks,
    allreduce,
    barrier,
    block_bounds,
    broadcast,
    doubles,
    doubling_allreduce,
    halving_doubling_allreduce,
    ring_allreduce,
)
from communicators.schedules.quantised import Rounded, quantised_allreduce, quantised_nbytes, quantised_spans

__all__ = [
    "RING_NBYTES",
    "Rounded",
    "allgather",
    "allgather_blocks",
    "allreduce",
    "among",
    "barrier",
    "block_bounds",
    "broadcast",
    "by_rate_allreduce",
    "check_shares",
    "doubles",
    "doubling_allreduce",
    "halving_doubling_allreduce",
    "largest_power_of_two",
    "powers_of_two",
    "quantised_allreduce",
    "quantised_nbytes",
    "quantised_spans",
    "ring_allreduce",
    "shares_by_rate",
]
