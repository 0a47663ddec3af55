"""A threshold from a sample, which most likely keeps little more than the k largest."""

from math import ceil, sqrt

import numpy as np

from sparse_compress.magnitude import Bits, magnitude_mask

MIN_SAMPLE, MAX_SAMPLE = 4096, 32768  # elements: reading a sample costs a cache miss each


def sampled_threshold(bits: Bits, k: int) -> int:
    """A key that about k·(1 + small) of the elements reach, guessed from a strided sample.

    Of m sampled elements e = m·k/n belong to the k largest, give or take √e. The guess is the sampled key of
    rank e + 4·√(e + 1) + 2, so it keeps fewer than k only when the sample misleads: the caller checks.
    """
    n = len(bits)
    size = min(max(n // 64, MIN_SAMPLE), MAX_SAMPLE)
    stride = n // size | 1  # odd: rows of even length do not put the sample into one column
    sample = bits[::stride] & magnitude_mask(bits)
    expected = len(sample) * k / n
    rank = min(ceil(expected + 4 * sqrt(expected + 1) + 2), len(sample))
    return int(np.partition(sample, len(sample) - rank)[len(sample) - rank])
