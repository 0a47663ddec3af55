"""Random numbers by key: a sample's are a function of run, epoch and sample alone, whoever reads it, and when.

So reading ahead, in any number of threads, and a resume give the same bits. SplitMix64 (Steele et al. 2014): the stream
of a key is the same on every machine and with every version of NumPy.
"""

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.uint64]
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def keys(seed: int, indices: npt.NDArray[np.int64]) -> Keys:
    """One for each sample [n]. seed: 64 bits, of one epoch of one run."""
    return _mixed(_mixed(np.array([seed], np.uint64)) + indices.astype(np.uint64) * GOLDEN)


def uniform(keys: Keys, count: int) -> npt.NDArray[np.float64]:
    """The first `count` numbers 0 ≤ u < 1 of each key [n, count]."""
    drawn = _mixed(keys[:, None] + np.arange(1, count + 1, dtype=np.uint64) * GOLDEN)
    return (drawn >> np.uint64(11)).astype(np.float64) * np.float64(2.0**-53)


def _mixed(x: Keys) -> Keys:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
