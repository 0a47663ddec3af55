"""Magnitudes as integers: a float's bits without the sign order by magnitude, and inf < NaN.

``keys = bits & 0x7FFFFFFF`` (float32; likewise for the other widths). The order is total, so selections are the
same bits everywhere, and a non-finite element is always among the largest.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

TYPE_OF_BITS = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}

Bits = NDArray[np.signedinteger[Any]]
Keys = NDArray[np.signedinteger[Any]]
Mask = NDArray[np.bool_]


def bits_of(x: Tensor) -> Bits:
    """Bit patterns of a CPU tensor, as an array over the same memory."""
    bits: Bits = x.view(TYPE_OF_BITS[x.dtype]).numpy()
    return bits


def magnitude_mask(bits: Bits) -> Any:
    """Pattern with every bit but the sign, of the same width: ``bits & mask`` are the keys."""
    return bits.dtype.type((1 << 8 * bits.itemsize - 1) - 1)


def largest(keys: Keys, k: int) -> Mask:
    """Mask of the k largest keys (0 ≤ k ≤ len), ties to the lowest position: exactly k are True."""
    if k == 0:
        return np.zeros(len(keys), bool)
    threshold = np.partition(keys, len(keys) - k)[len(keys) - k]
    selected: Mask = keys > threshold
    ties = k - np.count_nonzero(selected)
    selected[np.flatnonzero(keys == threshold)[:ties]] = True
    return selected


def magnitude_keys(x: Tensor) -> Tensor:
    """Keys of all elements, int16, int32 or int64; any device."""
    int_dtype = TYPE_OF_BITS[x.dtype]
    return x.view(int_dtype) & torch.iinfo(int_dtype).max


def largest_on_device(x: Tensor, k: int) -> Tensor:
    """Positions (int64, increasing) of the k largest magnitudes of a 1-D tensor, ties to the lowest position.

    Plain torch, any device, deterministic, no host synchronisation; takes temporaries of x's size.
    """
    order = torch.sort(magnitude_keys(x), descending=True, stable=True).indices
    return torch.sort(order[:k]).values
