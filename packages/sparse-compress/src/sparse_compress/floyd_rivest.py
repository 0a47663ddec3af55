"""The k-th largest of keys that are in memory anyway (Floyd & Rivest, CACM 1975).

Of m sampled keys e = m·k/n belong to the k largest of n, give or take √e. The sampled keys of rank
e ± (4·√(e + 1) + 2) most likely enclose the one looked for, so only what lies between is partitioned.
Differs from the paper: one round, a strided sample, and where it misleads all keys are partitioned.
"""

from math import ceil, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

SAMPLE = 2048  # keys; of fewer than four times as many none are spared


def kth_key(keys: NDArray[np.signedinteger[Any]], k: int) -> int:
    """The k-th largest of 1-D ``keys``, 0 < k ≤ len."""
    n = len(keys)
    if n < 4 * SAMPLE:
        return _partition(keys, k)
    sample = keys[:: n // SAMPLE | 1]
    m = len(sample)
    expected = m * k / n
    spread = 4 * sqrt(min(expected, m - expected) + 1) + 2
    ends = [max(m - ceil(expected + spread), 0), min(m - ceil(expected - spread), m - 1)]
    low, high = np.partition(sample, ends)[ends]
    between = keys.take(np.flatnonzero((keys >= low) & (keys <= high)))
    rank = k - int(np.count_nonzero(keys > high))
    return _partition(between, rank) if 0 < rank <= len(between) else _partition(keys, k)


def _partition(keys: NDArray[np.signedinteger[Any]], k: int) -> int:
    return int(np.partition(keys, len(keys) - k)[len(keys) - k])
