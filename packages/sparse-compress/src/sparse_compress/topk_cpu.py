"""Exact top-k on a CPU: sampled threshold, one filtering sweep, refinement among the few that are left."""

from collections.abc import Iterator

import numpy as np

from sparse_compress.chunks import Positions, above_and_ties, at_least, count_above
from sparse_compress.magnitude import Bits, largest, magnitude_mask
from sparse_compress.radix import kth_largest
from sparse_compress.threshold import sample_stride, sampled_threshold

SMALL = 1 << 13  # elements: up to here partitioning all of them costs no more than a sample and its candidates


def largest_entries(
    bits: Bits, k: int, *, sample: Bits | None = None, written: Iterator[None] | None = None
) -> tuple[Positions, Bits]:
    """Positions, increasing, and bits of the k largest magnitudes (0 < k ≤ n), ties to the lowest position.

    Usually a single sweep over the n elements. Ties with the threshold cost a second and a third one; what
    misleads the sample otherwise costs at most two more than the sweeps of radix select. Temporaries are
    O(k) plus n/64 positions, or a chunk.

    The first sweep can write what it reads: ``written`` is advanced once for each chunk of it, and ``sample``
    then holds the bits that will stand at every ``sample_stride(n)``-th position.
    """
    n = len(bits)
    if n <= SMALL:
        for _ in written or ():
            pass
        return largest_of(np.arange(n), bits, k)
    limit = 3 * k + n // 64
    threshold = sampled_threshold(bits[:: sample_stride(n)] if sample is None else sample, k, n)
    candidates = at_least(bits, threshold, limit, written)
    if candidates is None:
        above = count_above(bits, threshold)
        if above < k:  # the k-th largest ties with the threshold, as in constant or mostly zero tensors
            positions = above_and_ties(bits, threshold, k - above)
            return positions, bits[positions]
        if above <= limit:
            candidates = at_least(bits, threshold + 1, limit)
    if candidates is None or len(candidates[0]) < k:
        kth, above = kth_largest(bits, k)
        positions = above_and_ties(bits, kth, k - above)
        return positions, bits[positions]
    return largest_of(*candidates, k)


def largest_of(positions: Positions, bits: Bits, k: int) -> tuple[Positions, Bits]:
    """The k largest of some entries."""
    picked = np.flatnonzero(largest(bits & magnitude_mask(bits), k))
    return positions[picked], bits[picked]
