"""Choice of a scheme from the user's settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from communicators import Communicator
from sparse_collectives.algorithm import Algorithm
from sparse_collectives.algorithms.table import AUTO, known, resolve
from sparse_collectives.prediction.auto import Choice, choose_for_training
from sparse_compress import Compressor
from torch import Tensor

from data_parallel.exchange import Scheme
from data_parallel.schemes.selections import Selections
from data_parallel.schemes.table import WholeScheme, known_whole, whole_scheme
from data_parallel.schemes.tiny_whole import TinyWhole
from data_parallel.schemes.whole_gradients import WholeGradients


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
    if isinstance(algorithm, str) and algorithm == AUTO:
        choice = choose_for_training(parameters, comm, compressor, dense=not (momentum or selects), wire=wire)
        algorithm, options, wire = choice.algorithm, choice.options, choice.wire
    if not known(algorithm).selects:
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
