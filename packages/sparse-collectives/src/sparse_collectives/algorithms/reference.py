"""Building blocks of the algorithms' references: plain NumPy, no messages. For tests, and to read first."""

from collections.abc import Sequence

import numpy as np

from sparse_collectives.algorithm import Array


def cut(x: Array, k: int) -> Array:
    """The k largest of a dense vector, ties to the lowest index; zeros elsewhere."""
    kept = np.argsort(-np.abs(x), kind="stable")[:k]
    return np.where(np.isin(np.arange(len(x)), kept), x, np.zeros_like(x))


def tree(sums: Sequence[Array]) -> Array:
    """Adds neighbours, then the sums of neighbours, as `sparse_compress.add_all` does."""
    sums = list(sums)
    while len(sums) > 1:
        pairs = [low + high for low, high in zip(sums[::2], sums[1::2], strict=False)]
        sums = pairs if len(sums) % 2 == 0 else [*pairs, sums[-1]]
    return sums[0]


def sum_of_selections(inputs: Sequence[Array], k: int) -> Array:
    """Sum of every rank's k largest entries."""
    return tree([cut(x, k) for x in inputs])
