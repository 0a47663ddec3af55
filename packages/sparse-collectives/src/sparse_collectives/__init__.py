"""Sparse allreduce for PyTorch: gTop-k and its relatives, as calls and as a distributed optimizer."""

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
from sparse_collectives.training.ddp.hook import SparseHookState, sparse_hook
from sparse_collectives.training.exchange import Scheme, Transfer
from sparse_collectives.training.hsdp.state import HsdpState, sparse_hsdp
from sparse_collectives.training.optimizer import DistributedOptimizer
from sparse_collectives.training.schemes.residuals import Residuals
from sparse_collectives.training.schemes.table import WholeScheme
from sparse_collectives.training.state_dict import reshard_residuals
from sparse_collectives.version import __version__
from sparse_collectives.wire.invalid import given_by
from sparse_collectives.wire.wire import WIRES, Wire

__all__ = [
    "ALGORITHMS",
    "WIRES",
    "Algorithm",
    "Choice",
    "DenseReduction",
    "DistributedOptimizer",
    "GTopK",
    "HsdpState",
    "OkTopk",
    "Reduction",
    "Residuals",
    "Scheme",
    "SparDL",
    "SparseHookState",
    "TopKAllgather",
    "TopKDSA",
    "Traffic",
    "Transfer",
    "WholeScheme",
    "Wire",
    "__version__",
    "choose",
    "given_by",
    "reshard_residuals",
    "sparse_allreduce",
    "sparse_allreduce_async",
    "sparse_hook",
    "sparse_hsdp",
]
