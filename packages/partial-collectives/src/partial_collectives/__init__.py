"""Partial allreduces: rounds that do not wait for the last rank, and lose nothing of what it brings later."""

from partial_collectives.eager_sgd import EagerSGD
from partial_collectives.partial_allreduce import PartialAllreduce
from partial_collectives.result import PartialResult
from partial_collectives.stragglers import Lateness, injected_delays, until_deadline
from partial_collectives.version import __version__

__all__ = [
    "EagerSGD",
    "Lateness",
    "PartialAllreduce",
    "PartialResult",
    "__version__",
    "injected_delays",
    "until_deadline",
]
