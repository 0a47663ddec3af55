"""Entries of a vector picked by a mask, brought to a size that is known beforehand."""

import torch
from torch import Tensor

from sparse_compress.vector import SparseVector


def compact(indices: Tensor, values: Tensor, picked: Tensor, count: int, numel: int) -> SparseVector:
    """The entries that are ``picked``, and explicit zeros at the lowest unused indices: exactly ``count``.

    ``indices``: int32, (m,), increasing where picked. ``picked``: bool, (m,); at most count ≤ numel are True, which
    is trusted. Plain torch on any device, deterministic; nothing is read back.
    """
    near = indices.long().masked_fill(~picked, count).clamp_(max=count)
    used = picked.new_zeros(count + 1).index_fill_(0, near, True)
    # Of the first `count` indices at most as many are used as entries are picked, so enough unused ones lie there.
    unused = ~used[:count]
    unused_before = unused.cumsum(0) - unused.long()
    zero = unused & (unused_before < count - picked.sum())
    zeros_before = near.new_zeros(count + 1)
    zeros_before[1:] = zero.cumsum(0)
    entry_places = (picked.cumsum(0) - 1 + zeros_before[near]).masked_fill(~picked, count)
    index = torch.arange(count, device=indices.device)
    zero_places = (zeros_before[:-1] + index - unused_before).masked_fill(~zero, count)
    # Every place is written once, but for place `count`, which takes what is not picked and is cut off.
    all_indices = indices.new_empty(count + 1).index_copy_(0, entry_places, indices)
    all_values = values.new_zeros(count + 1).index_copy_(0, entry_places, values)
    all_indices.index_copy_(0, zero_places, index.int())
    all_values.index_fill_(0, zero_places, 0)
    vector = SparseVector.allocate(count, numel, values.dtype, values.device)
    vector.indices.copy_(all_indices[:count])
    vector.values.copy_(all_values[:count])
    return vector
