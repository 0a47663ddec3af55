"""Local SGD and its family: ranks take steps of their own, and exchange a mean of their models now and then."""

from collections.abc import Callable

from local_sgd.algorithms.bmuf import BMUF
from local_sgd.algorithms.cocod import CoCoDSGD
from local_sgd.algorithms.demo import DeMo
from local_sgd.algorithms.diloco import DiLoCo
from local_sgd.algorithms.easgd import EASGD
from local_sgd.algorithms.local_sgd import LocalSGD
from local_sgd.algorithms.overlap import OverlapLocalSGD
from local_sgd.algorithms.slowmo import SlowMo
from local_sgd.algorithms.sparseloco import SparseLoCo
from local_sgd.algorithms.streaming_diloco import StreamingDiLoCo
from local_sgd.periodic import PeriodicAveraging
from local_sgd.rule import Part, Rule
from local_sgd.version import __version__

ALGORITHMS: dict[str, Callable[..., PeriodicAveraging]] = {
    "local-sgd": LocalSGD,
    "bmuf": BMUF,
    "slowmo": SlowMo,
    "easgd": EASGD,
    "cocod": CoCoDSGD,
    "overlap-local-sgd": OverlapLocalSGD,
    "diloco": DiLoCo,
    "streaming-diloco": StreamingDiLoCo,
    "sparseloco": SparseLoCo,
    "demo": DeMo,
}
"""Algorithms by name. A new one is its own file and one line here; tests, trainer and benchmark read this table."""

__all__ = [
    "ALGORITHMS",
    "BMUF",
    "EASGD",
    "CoCoDSGD",
    "DeMo",
    "DiLoCo",
    "LocalSGD",
    "OverlapLocalSGD",
    "Part",
    "PeriodicAveraging",
    "Rule",
    "SlowMo",
    "SparseLoCo",
    "StreamingDiLoCo",
    "__version__",
]
