"""Choice of a scheme from the user's settings."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

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
) -> tuple[Scheme, Choice | None]:
    """Makes the scheme for settings that `check_settings` has passed; "auto" measures, so all ranks call together.

    dense_below: beside a selection, tensors of fewer elements are summed dense.
    selects: whether "auto" must take an algorithm that selects, as with momentum.

    Returns the scheme, and the choice of "auto" if asked.
    Raises ValueError for options that do not fit the number of ranks, and without parameters to choose for.
    """
    choice = None
    if (own := known_whole(algorithm)) is not None:
        whole, settings = whole_scheme(own, options, comm)
        return _with(whole, own.name, None, wire, settings), choice
    assert not isinstance(algorithm, WholeScheme)
    if algorithm == "auto":
        choice = choose_for_training(parameters, comm, compressor, dense=not (momentum or selects), wire=wire)
        algorithm, options, wire = choice.algorithm, choice.options, choice.wire
    if not resolve(algorithm).selects:
        entry = resolve(algorithm, options, size=comm.size)
        return _with(WholeGradients(comm, wire=wire), entry.name, entry, wire, entry.settings), choice
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
        return _with(scheme, entry.name, entry, wire, entry.settings), choice
    both = TinyWhole(scheme, comm, below=dense_below, momentum=momentum)
    return _with(both, entry.name, entry, wire, [*entry.settings, f"{dense_below=}"]), choice


def _with(scheme: Any, name: str, entry: Algorithm | None, wire: str, settings: Sequence[str]) -> Scheme:
    scheme.name, scheme.entry, scheme.wire, scheme.settings = name, entry, wire, settings
    scheme.selects = entry is not None and entry.selects
    return scheme  # type: ignore[no-any-return]


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
