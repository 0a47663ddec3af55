"""Entries of a vector picked by a mask, brought to a size that is known beforehand."""

import torch
from torch import Tensor

from sparse_compress.vector import SparseVector


def compact(indices: Tensor, values: Tensor, picked: Tensor, count: int, numel: int) -> SparseVector:
    """The entries that are ``picked``, and explicit zeros at the lowest unused indices: exactly ``count``.

    ``indices``: int32, (m,), increasing where picked. ``picked``: bool, (m,); at most count ≤ numel are True, which
    is trusted. Plain torch on any device, deterministic; nothing is read back.
    """
    near = torch.where(picked, indices, count).clamp_(max=count).long()
    unused = picked.new_ones(count + 1).index_fill_(0, near, False)
    # Enough of the first `count` indices are unused, because at most as many are used as entries are picked. A zero is
    # at the place of its index, because all places before it are taken; an entry comes after the zeros before it.
    zeros_up_to = unused.cumsum(0).clamp_(max=count - picked.sum())
    places = torch.where(picked, picked.cumsum(0) + zeros_up_to[near], 0)  # from 1; what is not picked goes to 0
    all_indices = torch.arange(-1, count, dtype=torch.int32, device=indices.device).index_copy_(0, places, indices)
    all_values = values.new_zeros(count + 1).index_copy_(0, places, values)
    vector = SparseVector.allocate(count, numel, values.dtype, values.device)
    vector.indices.copy_(all_indices[1:])
    vector.values.copy_(all_values[1:])
    return vector
