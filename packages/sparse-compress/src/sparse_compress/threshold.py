"""A threshold from a sample, which most likely keeps little more than the k largest."""

from math import ceil, sqrt

import numpy as np

from sparse_compress.magnitude import Bits, magnitude_mask

MIN_SAMPLE, MAX_SAMPLE = 4096, 32768  # elements: reading each costs a cache miss


def sample_stride(n: int) -> int:
    """Every how many-th of n elements is sampled. Odd: rows of even length do not put the sample into one column."""
    return n // min(max(n // 256, MIN_SAMPLE), MAX_SAMPLE) | 1


def sampled_threshold(sample: Bits, k: int, n: int) -> int:
    """A key that about k·(1 + small) of n elements reach, guessed from a strided ``sample`` of them.

    Of m sampled elements e = m·k/n belong to the k largest, give or take √e. The guess is the sampled key of
    rank e + 4·√(e + 1) + 2, so it keeps fewer than k only when the sample misleads: the caller checks.
    """
    keys = sample & magnitude_mask(sample)
    expected = len(keys) * k / n
    rank = min(ceil(expected + 4 * sqrt(expected + 1) + 2), len(keys))
    return int(np.partition(keys, len(keys) - rank)[len(keys) - rank])
