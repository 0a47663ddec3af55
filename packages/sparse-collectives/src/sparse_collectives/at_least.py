"""Selection by a least magnitude."""

from __future__ import annotations

import numpy as np
import torch
from sparse_compress import SparseVector, chunks, topk
from sparse_compress.magnitude import bits_of, largest, magnitude_keys
from sparse_compress.topk import gather
from torch import Tensor


def at_least(x: Tensor, key: int, k: int) -> SparseVector:
    """The elements of a 1-D tensor with that key (magnitude as an integer) or a larger one; the k largest, if more.

    On a CPU one sweep, unless very many have it, and no temporary of x's size.
    """
    if x.device.type != "cpu":
        positions = (magnitude_keys(x) >= key).nonzero().view(-1)
        return gather(x, positions) if len(positions) <= k else topk(x, k)
    found = chunks.at_least(bits_of(x), key, 3 * k + len(x) // 64)
    if found is None:
        return topk(x, k)
    reaching, keys = found
    if len(reaching) > k:
        reaching = reaching[np.flatnonzero(largest(keys, k))]
    return gather(x, torch.from_numpy(reaching))
