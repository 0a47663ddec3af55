"""Choice of a scheme from the user's settings."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from communicators import Communicator
from sparse_collectives import ALGORITHMS, Algorithm, Choice, choose, resolve
from sparse_compress import Compressor
from torch import Tensor

from data_parallel.exchange import Scheme
from data_parallel.schemes.selections import Selections
from data_parallel.schemes.table import WholeScheme, known_whole, whole_scheme
from data_parallel.schemes.tiny_whole import TinyWhole
from data_parallel.schemes.whole_gradients import WholeGradients

logger = logging.getLogger(__name__)


class Chosen(NamedTuple):
    """Scheme for a user's settings. algorithm: its name. choice: that of "auto", if asked. settings: options, as text.

    entry: the sparse allreduce, None for a `WholeScheme`. wire: the one in use.
    """

    algorithm: str
    entry: Algorithm | None
    wire: str
    choice: Choice | None
    scheme: Scheme
    settings: list[str]

    @property
    def selects(self) -> bool:
        """Whether entries are selected, as many as the compressor says."""
        return self.entry is not None and self.entry.selects


def choose_scheme(
    comm: Communicator,
    *,
    algorithm: str | Algorithm | WholeScheme,
    options: Mapping[str, Any] | None,
    wire: str,
    compressor: Compressor,
    momentum: float,
    dense_below: int = 0,
    selects: bool = False,
    parameters: Sequence[Tensor],
    tentative: bool,
) -> Chosen:
    """Makes the scheme for settings that `check_settings` has passed; "auto" measures, so all ranks call together.

    dense_below: beside a selection, tensors of fewer elements are summed dense.
    selects: whether "auto" must take an algorithm that selects, as with momentum.

    Raises ValueError for options that do not fit the number of ranks, and without parameters to choose for.
    """
    choice = None
    if (own := known_whole(algorithm)) is not None:
        whole, settings = whole_scheme(own, options, comm)
        return Chosen(own.name, None, wire, choice, whole, settings)
    assert not isinstance(algorithm, WholeScheme)
    if algorithm == "auto":
        choice = choose_for_training(parameters, comm, compressor, dense=not (momentum or selects), wire=wire)
        algorithm, options, wire = choice.algorithm, choice.options, choice.wire
    if not resolve(algorithm).selects:
        entry = resolve(algorithm, options, size=comm.size)
        return Chosen(entry.name, entry, wire, choice, WholeGradients(comm, wire=wire), entry.settings)
    entry = resolve(algorithm, options, size=comm.size, wire=wire)
    scheme = Selections(
        comm,
        algorithm=entry,
        compressor=compressor,
        wire=wire,
        momentum=momentum,
        tentative=tentative,
    )
    if not dense_below:
        return Chosen(entry.name, entry, wire, choice, scheme, entry.settings)
    both = TinyWhole(scheme, comm, below=dense_below, momentum=momentum)
    return Chosen(entry.name, entry, wire, choice, both, [*entry.settings, f"{dense_below=}"])


def choose_for_training(
    parameters: Sequence[Tensor], comm: Communicator, compressor: Compressor, *, dense: bool, wire: str
) -> Choice:
    """The choice for a model's gradients, logged on rank 0.

    dense: whether that may be chosen; not where momentum before the selection, or exchanged updates, need one.
    Raises ValueError without parameters.
    """
    sizes = [(p.numel(), p.device) for p in parameters if p.numel()]
    if not sizes:
        raise ValueError('algorithm="auto" chooses by the size of the model: give named_parameters')
    numel = sum(count for count, _ in sizes)
    k, device = compressor.entries(numel), sizes[0][1]
    choice = choose(comm, numel=numel, k=k, device=device, dense=dense, wire=wire)
    if comm.rank == 0:
        unexpected = not ALGORITHMS[choice.predictions[0].algorithm].selects
        logger.log(logging.WARNING if unexpected and comm.size > 1 else logging.INFO, "algorithm auto\n%s", choice)
    return choice
