"""Collectives written as schedules, carried by MPI, torch.distributed or a simulated world."""

from communicators import metrics, schedules, tracing
from communicators.background.engine import leave
from communicators.buckets import Bucket, buckets_of
from communicators.collectives import allgather, allreduce, allreduce_async, barrier, broadcast
from communicators.communicator import Communicator, Work, run, start
from communicators.elastic.elastic import Elastic
from communicators.elastic.membership import LeftOutError
from communicators.errors import CollectiveError
from communicators.link import Link, Path, measure_link
from communicators.origin import as_communicator
from communicators.paths import Paths, measure_paths
from communicators.schedule import SLOT_BYTES, Elapse, Payload, Received, Round, Schedule
from communicators.schedules.by_rate import shares_by_rate
from communicators.settings import check_settings, comparable
from communicators.signals import Attempt, Signals
from communicators.simulated.network import BoardLost, Corrupts, Dies, LinkLost
from communicators.simulated.world import SimulatedWorld
from communicators.stats import Stats
from communicators.version import __version__
from communicators.worlds.alone import Alone

__all__ = [
    "SLOT_BYTES",
    "Alone",
    "Attempt",
    "BoardLost",
    "Bucket",
    "CollectiveError",
    "Communicator",
    "Corrupts",
    "Dies",
    "Elapse",
    "Elastic",
    "LeftOutError",
    "Link",
    "LinkLost",
    "Path",
    "Paths",
    "Payload",
    "Received",
    "Round",
    "Schedule",
    "Signals",
    "SimulatedWorld",
    "Stats",
    "Work",
    "__version__",
    "allgather",
    "allreduce",
    "allreduce_async",
    "as_communicator",
    "barrier",
    "broadcast",
    "buckets_of",
    "check_settings",
    "comparable",
    "leave",
    "measure_link",
    "measure_paths",
    "metrics",
    "run",
    "schedules",
    "shares_by_rate",
    "start",
    "tracing",
]
