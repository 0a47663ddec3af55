"""Data-parallel training that sends sparse gradients or updates: optimizers, DDP's hook, and HSDP."""

from data_parallel.ddp.hook import SparseHookState, sparse_hook
from data_parallel.hsdp.state import HsdpState, sparse_hsdp
from data_parallel.optimizer import DistributedOptimizer
from data_parallel.schemes.dense import DenseCompressor
from data_parallel.schemes.powersgd import powersgd_sent
from data_parallel.settings import ExchangeSettings
from data_parallel.state_dict import reshard_residuals
from data_parallel.update_optimizer import UpdateOptimizer
from data_parallel.version import __version__

__all__ = [
    "DenseCompressor",
    "DistributedOptimizer",
    "ExchangeSettings",
    "HsdpState",
    "SparseHookState",
    "UpdateOptimizer",
    "__version__",
    "powersgd_sent",
    "reshard_residuals",
    "sparse_hook",
    "sparse_hsdp",
]
