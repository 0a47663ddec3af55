"""Sparse allreduce for PyTorch: gTop-k and its relatives, as calls, with predictions and advice."""

from sparse_collectives.algorithm import Algorithm
from sparse_collectives.algorithms.gtopk import GTopK
from sparse_collectives.algorithms.oktopk import OkTopk
from sparse_collectives.algorithms.spardl import SparDL
from sparse_collectives.algorithms.table import ALGORITHMS
from sparse_collectives.algorithms.topk_allgather import TopKAllgather
from sparse_collectives.algorithms.topk_dsa import TopKDSA
from sparse_collectives.allreduce import sparse_allreduce, sparse_allreduce_async
from sparse_collectives.arrays import DenseReduction
from sparse_collectives.prediction.auto import Choice, choose
from sparse_collectives.reduction import Reduction
from sparse_collectives.traffic import Traffic
from sparse_collectives.version import __version__
from sparse_collectives.wire.invalid import given_by
from sparse_collectives.wire.wire import WIRES, Wire

__all__ = [
    "ALGORITHMS",
    "WIRES",
    "Algorithm",
    "Choice",
    "DenseReduction",
    "GTopK",
    "OkTopk",
    "Reduction",
    "SparDL",
    "TopKAllgather",
    "TopKDSA",
    "Traffic",
    "Wire",
    "__version__",
    "choose",
    "given_by",
    "sparse_allreduce",
    "sparse_allreduce_async",
]
