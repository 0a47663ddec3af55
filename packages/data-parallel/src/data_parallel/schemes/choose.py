"""Scheme for a user's settings: a sparse allreduce, a dense sum, or a `DenseCompressor`, by name or your own.

Dense compressors are for training only, since they live by error feedback. A new one is its own file and one line here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from communicators import Communicator
from sparse_collectives.algorithm import Algorithm
from sparse_collectives.algorithms.table import ALGORITHMS, AUTO, known, resolve
from sparse_collectives.prediction.auto import Choice, choose_for_training
from sparse_compress import Compressor
from torch import Tensor

from data_parallel.lanes import Scheme
from data_parallel.schemes.dense import DenseCompressor, DenseScheme
from data_parallel.schemes.dense_int8 import DenseInt8
from data_parallel.schemes.powersgd import PowerSGD
from data_parallel.schemes.small_tensors import DenseSmallTensors
from data_parallel.schemes.sparse import SparseScheme

COMPRESSORS: dict[str, DenseCompressor] = {"powersgd": PowerSGD(), "dense-int8": DenseInt8()}


def choose_scheme(
    comm: Communicator,
    *,
    algorithm: str | Algorithm | DenseCompressor,
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
    if (own := known_compressor(algorithm)) is not None:
        return own.given(options).scheme(comm), choice
    assert not isinstance(algorithm, DenseCompressor)
    if isinstance(algorithm, str) and algorithm == AUTO:
        choice = choose_for_training(parameters, comm, compressor, dense=not (momentum or selects), wire=wire)
        algorithm, options, wire = choice.algorithm, choice.options, choice.wire
    if not known(algorithm).selects:
        return DenseScheme(comm, resolve(algorithm, options, size=comm.size), wire=wire), choice
    entry = resolve(algorithm, options, size=comm.size, wire=wire)
    sparse = SparseScheme(comm, entry, compressor, wire=wire, momentum=momentum, tentative=tentative)
    return DenseSmallTensors(sparse, below=dense_below) if dense_below else sparse, choice


def known_compressor(algorithm: object) -> DenseCompressor | None:
    """The dense compressor of that name, or your own; None for anything else.

    Raises TypeError or ValueError for one of your own without a schedule, without a name, or of a name in use.
    """
    if isinstance(algorithm, str):
        return COMPRESSORS.get(algorithm)
    kind = algorithm if isinstance(algorithm, type) else type(algorithm)
    if not issubclass(kind, DenseCompressor):
        return None
    if not isinstance(algorithm, DenseCompressor):
        raise TypeError(f"algorithm is the class {kind.__name__}, expected one of it, as {kind.__name__}()")
    if kind not in map(type, COMPRESSORS.values()):
        _check_own(algorithm)
    return algorithm


def check_compressed(
    entry: DenseCompressor, options: Mapping[str, Any] | None, wire: str, momentum: float, optimizer: str
) -> None:
    """Checks a user's settings for one. Raises TypeError or ValueError; optimizer: the place where momentum belongs."""
    entry.given(options)
    if wire != "fp32":
        raise ValueError(f"{entry.name} has a wire of its own, so wire={wire!r} would have no effect: leave it out")
    if momentum:
        raise ValueError(f"{entry.name} selects nothing, so momentum={momentum} belongs into {optimizer}")


def _check_own(own: DenseCompressor) -> None:
    kind = type(own)
    if kind.schedule is DenseCompressor.schedule and kind.scheme is DenseCompressor.scheme:
        raise TypeError(f"{kind.__name__} has no schedule, which is all that a DenseCompressor needs")
    if not isinstance(own.name, str):
        raise TypeError(f"the name of {kind.__name__} is {own.name!r}, expected text")
    if not own.name:
        raise ValueError(f"{kind.__name__} has no name: give it one, name = 'mine'")
    if own.name in ALGORITHMS or own.name in COMPRESSORS or own.name == AUTO:
        raise ValueError(f"the name of {kind.__name__} is {own.name!r}, which is another's: give it one of its own")
