"""Sparse allreduce for PyTorch: gTop-k and its relatives, as calls and as a distributed optimizer."""

from sparse_collectives.algorithm import Algorithm
from sparse_collectives.algorithms import ALGORITHMS
from sparse_collectives.allreduce import sparse_allreduce, sparse_allreduce_async
from sparse_collectives.arrays import DenseReduction
from sparse_collectives.auto import Choice, choose
from sparse_collectives.checkpoint import reshard_residuals
from sparse_collectives.ddp_hook import SparseHookState, sparse_hook
from sparse_collectives.invalid import given_by
from sparse_collectives.optimizer import DistributedOptimizer
from sparse_collectives.reduction import Reduction
from sparse_collectives.traffic import Traffic
from sparse_collectives.wire import WIRES, Wire

__all__ = [
    "ALGORITHMS",
    "WIRES",
    "Algorithm",
    "Choice",
    "DenseReduction",
    "DistributedOptimizer",
    "Reduction",
    "SparseHookState",
    "Traffic",
    "Wire",
    "choose",
    "given_by",
    "reshard_residuals",
    "sparse_allreduce",
    "sparse_allreduce_async",
    "sparse_hook",
]
