"""Scheme for a user's settings: a sparse allreduce, a dense sum, or a `DenseCompressor`, by name or your own."""

import logging
from collections.abc import Sequence

from communicators import Communicator
from sparse_collectives import ALGORITHMS, Choice, choose, resolve
from sparse_compress import TopK
from torch import Tensor

from data_parallel.lanes import Scheme
from data_parallel.schemes.dense import DenseCompressor, DenseScheme
from data_parallel.schemes.small_tensors import DenseSmallTensors
from data_parallel.schemes.sparse import SparseScheme
from data_parallel.settings import Settings

logger = logging.getLogger(__name__)


def choose_scheme(
    settings: Settings, comm: Communicator, *, selects: bool, parameters: Sequence[Tensor]
) -> tuple[Scheme, Choice | None]:
    """Makes the scheme for a user's settings; "auto" measures, so all ranks call together.

    selects: whether "auto" must take an algorithm that selects, as with momentum. parameters: those that it is for.

    Returns the scheme, and the choice of "auto" if asked.
    Raises ValueError for options that do not fit the number of ranks, unless that may change, and for "auto" where
    ranks may come and go.
    """
    entry, wire, choice = settings.entry, settings.wire, None
    if isinstance(entry, DenseCompressor):
        return entry.scheme(comm), None
    if entry is None:
        if comm.elastic:
            raise ValueError(
                'algorithm="auto" chooses what is fastest for the ranks that it measures, but those of an Elastic come '
                'and go: name an algorithm, such as the default "gtopk"'
            )
        choice = _chosen(parameters, comm, settings, dense=not (settings.momentum or selects))
        entry, wire = resolve(choice.algorithm, choice.options), choice.wire
    fits = entry.fitted if comm.elastic else entry.check
    fits(comm.size)
    if not entry.selects:
        return DenseScheme(comm, entry, wire=wire), choice
    kind = DenseSmallTensors if settings.dense_below else SparseScheme
    entry = resolve(entry, size=None if comm.elastic else comm.size, wire=wire)
    return kind(comm, entry, settings, wire=wire), choice


def _chosen(parameters: Sequence[Tensor], comm: Communicator, settings: Settings, *, dense: bool) -> Choice:
    """The choice for a model's gradients, logged on rank 0. dense: whether that may be chosen."""
    numel, device, compressor = sum(p.numel() for p in parameters), parameters[0].device, settings.compressor
    if hasattr(settings.density, "density"):  # a warm-up is short, and its first step dense
        compressor = TopK(settings.last_density)
    choice = choose(comm, numel=numel, k=compressor.entries(numel), device=device, dense=dense, wire=settings.wire)
    if comm.rank == 0:
        unexpected = not ALGORITHMS[choice.predictions[0].algorithm].selects
        logger.log(logging.WARNING if unexpected and comm.size > 1 else logging.INFO, "algorithm auto\n%s", choice)
    return choice
