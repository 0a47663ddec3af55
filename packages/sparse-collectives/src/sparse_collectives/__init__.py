"""Sparse allreduce for PyTorch: gTop-k and its relatives, as calls, with predictions and advice."""

from sparse_collectives.algorithm import Algorithm, Reduction, Traffic, check_options
from sparse_collectives.algorithms.arc_topk import ARCTopK
from sparse_collectives.algorithms.gtopk import GTopK
from sparse_collectives.algorithms.oktopk import OkTopk
from sparse_collectives.algorithms.spardl import SparDL
from sparse_collectives.algorithms.table import ALGORITHMS, resolve
from sparse_collectives.algorithms.topk_allgather import TopKAllgather
from sparse_collectives.algorithms.topk_dsa import TopKDSA
from sparse_collectives.allreduce import sparse_allreduce, sparse_allreduce_async
from sparse_collectives.arrays import DenseReduction, sparse_allreduce_array, sparse_allreduce_array_async
from sparse_collectives.prediction.auto import Choice, choose
from sparse_collectives.prediction.cost import Handling, Prediction
from sparse_collectives.version import __version__
from sparse_collectives.wire import DENSE_WIRES, WIRES, Wire, blame_rank

__all__ = [
    "ALGORITHMS",
    "DENSE_WIRES",
    "WIRES",
    "ARCTopK",
    "Algorithm",
    "Choice",
    "DenseReduction",
    "GTopK",
    "Handling",
    "OkTopk",
    "Prediction",
    "Reduction",
    "SparDL",
    "TopKAllgather",
    "TopKDSA",
    "Traffic",
    "Wire",
    "__version__",
    "blame_rank",
    "check_options",
    "choose",
    "resolve",
    "sparse_allreduce",
    "sparse_allreduce_array",
    "sparse_allreduce_array_async",
    "sparse_allreduce_async",
]
