"""Choice of a scheme from the user's settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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
    if isinstance(algorithm, str) and algorithm == AUTO:
        choice = choose_for_training(parameters, comm, compressor, dense=not (momentum or selects), wire=wire)
        algorithm, options, wire = choice.algorithm, choice.options, choice.wire
    if not known(algorithm).selects:
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
