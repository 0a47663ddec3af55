"""Dense compressors by name: for training only, since they live by error feedback.

A new one is its own file and one line here; one of your own stands wherever a name does.
"""

from communicators import check_settings
from sparse_collectives import ALGORITHMS

from data_parallel.schemes.dense import DenseCompressor
from data_parallel.schemes.dense_int8 import DenseInt8
from data_parallel.schemes.powersgd import PowerSGD

COMPRESSORS: dict[str, DenseCompressor] = {"powersgd": PowerSGD(), "dense-int8": DenseInt8()}


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


def _check_own(own: DenseCompressor) -> None:
    kind = type(own)
    if kind.schedule is DenseCompressor.schedule and kind.scheme is DenseCompressor.scheme:
        raise TypeError(f"{kind.__name__} has no schedule, which is all that a DenseCompressor needs")
    check_settings(kind, DenseCompressor)
    if not isinstance(own.name, str):
        raise TypeError(f"the name of {kind.__name__} is {own.name!r}, expected text")
    if not own.name:
        raise ValueError(f"{kind.__name__} has no name: give it one, name = 'mine'")
    if own.name in ALGORITHMS or own.name in COMPRESSORS or own.name == "auto":
        raise ValueError(f"the name of {kind.__name__} is {own.name!r}, which is another's: give it one of its own")
