"""Selection by a least magnitude."""

from __future__ import annotations

from sparse_compress import SparseVector, chunks, topk
from sparse_compress.magnitude import bits_of, magnitude_keys
from sparse_compress.topk import from_bits, gather
from sparse_compress.topk_cpu import largest_of
from torch import Tensor


def at_least(x: Tensor, key: int, k: int) -> SparseVector:
    """The elements of a 1-D tensor with that key (magnitude as an integer) or a larger one; the k largest, if more.

    On a CPU one sweep, unless very many have it, and no temporary of x's size.
    """
    if x.device.type != "cpu":
        reaching = (magnitude_keys(x) >= key).nonzero().view(-1)
        return gather(x, reaching) if len(reaching) <= k else topk(x, k)
    found = chunks.at_least(bits_of(x), key, 3 * k + len(x) // 64)
    if found is None:
        return topk(x, k)
    positions, bits = found if len(found[0]) <= k else largest_of(*found, k)
    return from_bits(positions, bits, x)
