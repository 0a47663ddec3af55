"""State kept of gradients between steps: by bucket while it is used, by parameter while it is saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from communicators import Bucket
from torch import Tensor


def split(flats: Mapping[str, Tensor], buckets: Mapping[str, Bucket], names: Sequence[str]) -> dict[str, Tensor]:
    """Tensors by parameter, as views of those by bucket; names are those of the buckets' members."""
    return {
        names[member]: view
        for key, flat in flats.items()
        for member, view in zip(buckets[key].members, buckets[key].views(flat), strict=True)
    }


def empty_like(bucket: Bucket) -> Tensor:
    """Flat tensor in which a bucket accumulates: float32, or the bucket's dtype where that is wider."""
    dtype = torch.promote_types(bucket.dtype, torch.float32)
    return torch.empty(bucket.numel, dtype=dtype, device=bucket.device)
