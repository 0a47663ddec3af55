"""The exact k-th largest magnitude by radix select: bounded on any input."""

import numpy as np

from sparse_compress.chunks import key_chunks
from sparse_compress.magnitude import Bits

DIGIT_BITS = 11  # 31-bit keys take three sweeps; a histogram of 2,048 counts stays in L1


def kth_largest(bits: Bits, k: int) -> tuple[int, int]:
    """The k-th largest key (0 < k ≤ len) and how many are strictly greater.

    Fixes the key digit by digit from the top. Each sweep counts the next digit among the keys that agree with
    what is known so far: 2 sweeps for 16-bit floats, 3 for float32, 6 for float64.
    """
    key, greater = 0, 0
    high = bits.dtype.itemsize * 8 - 1
    while high:
        low = max(0, high - DIGIT_BITS)
        counts = _digit_counts(bits, key, high, low)
        at_or_above = np.cumsum(counts[::-1])[::-1]
        digit = int(np.count_nonzero(at_or_above >= k - greater)) - 1  # the largest digit that k still reaches
        greater += int(at_or_above[digit] - counts[digit])
        key = key << (high - low) | digit
        high = low
    return key, greater


def _digit_counts(bits: Bits, prefix: int, high: int, low: int) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    """Histogram of bits low … high − 1 of the keys whose bits from ``high`` upwards equal ``prefix``."""
    digits = 1 << (high - low)
    counts = np.zeros(digits, np.intp)
    for _, keys in key_chunks(bits):
        keys >>= low
        keys -= bits.dtype.type(prefix << (high - low))
        # Seen unsigned, keys of a smaller prefix wrap round to large numbers, so one comparison finds the matching.
        unsigned = keys.view(f"u{bits.dtype.itemsize}")
        counts += np.bincount(keys[unsigned < digits], minlength=digits)
    return counts
