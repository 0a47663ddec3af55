"""Magnitudes as integers: a float's bits without the sign order by magnitude, and inf < NaN.

``keys = bits & 0x7FFFFFFF`` (float32; likewise for the other widths). The order is total, so selections are the
same bits everywhere, and a non-finite element is always among the largest.
"""

from functools import cache

import numpy as np
import torch
from torch import Tensor

TYPE_OF_BITS = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}


def magnitude_keys(x: Tensor) -> Tensor:
    """Keys of all elements, in their order by magnitude.

    Args:
        x: Floats, on any device.

    Returns:
        int16, int32 or int64, as wide as the floats, not negative.
    """
    int_dtype = TYPE_OF_BITS[x.dtype]
    return x.view(int_dtype) & torch.iinfo(int_dtype).max


def largest(keys: Tensor, k: int) -> Tensor:
    """Mask of the k largest keys (0 ≤ k ≤ len), ties to the lowest position: exactly k are True.

    Deterministic; no host synchronisation. On a CPU by NumPy, whose partition takes a tenth of a sort's time.
    """
    if not keys.is_cpu:
        return torch.zeros_like(keys, dtype=torch.bool).index_fill_(0, largest_on_device(keys, k), True)
    if not k:
        return torch.zeros(len(keys), dtype=torch.bool, device="cpu")
    given = keys.numpy()
    threshold = np.partition(given, len(given) - k)[len(given) - k]
    selected = given > threshold
    ties = k - np.count_nonzero(selected)
    selected[np.flatnonzero(given == threshold)[:ties]] = True
    return torch.from_numpy(selected)


def largest_on_device(keys: Tensor, k: int) -> Tensor:
    """Positions (int64) of the k largest keys, in their order, ties to the lowest position; takes temporaries."""
    return torch.sort(keys, descending=True, stable=True).indices[:k]


def positions(mask: Tensor) -> Tensor:
    """Positions (int64, increasing) where a mask is True; their number is read back from a device."""
    # In NumPy a tenth of what indexing by a mask takes.
    return torch.from_numpy(np.flatnonzero(mask.numpy())) if mask.is_cpu else mask.nonzero().view(-1)


@cache
def key_of_inf(dtype: torch.dtype) -> int:
    """Key of inf, the largest that a threshold may have: inf and NaN reach any."""
    return int(magnitude_keys(torch.tensor(torch.inf, dtype=dtype, device="cpu")))
