"""Selection by a given threshold, cut to a bound: what the threshold compressors share."""

import torch
from torch import Tensor

from sparse_compress.chunks import at_least, count_above
from sparse_compress.dense import flatten
from sparse_compress.magnitude import bits_of, magnitude_keys
from sparse_compress.topk import from_bits, gather, topk
from sparse_compress.topk_cpu import largest_of
from sparse_compress.vector import SparseVector


def select_at_least(x: Tensor, threshold: float, k: int) -> SparseVector:
    """The elements of ``x`` whose magnitude reaches ``threshold``, the k largest of them where they are more.

    NaN and inf reach any threshold. A tensor with a non-zero element never gives an empty vector: the largest
    goes where none reaches; an all-zero one gives none where ``threshold`` > 0. On a GPU the number is read back.
    """
    flat = flatten(x)
    if not len(flat) or not k:
        return topk(flat, 0)
    selected = reaching(flat, threshold_key(threshold, flat.dtype), k)
    if len(selected):
        return selected
    only = topk(flat, 1)
    return only if bool(only.values.any()) else topk(flat, 0)


def reaching(flat: Tensor, key: int, k: int) -> SparseVector:
    """The elements of a 1-D tensor with that key (magnitude as an integer) or a larger one; the k largest, if more.

    On a CPU one sweep, unless very many reach it, and no temporary of the tensor's size. On a GPU their number is
    read back.
    """
    if not flat.is_cpu:
        positions = (magnitude_keys(flat) >= key).nonzero().view(-1)
        return gather(flat, positions) if len(positions) <= k else topk(flat, k)
    found = at_least(bits_of(flat), key, 3 * k + len(flat) // 64)
    if found is None:  # so many that selecting all of them and cutting would not pay
        return topk(flat, k)
    positions_and_bits = found if len(found[0]) <= k else largest_of(*found, k)
    return from_bits(*positions_and_bits, flat)


def count_at_least(x: Tensor, threshold: float) -> int:
    """How many elements of ``x`` have a magnitude of at least ``threshold`` > 0; read back from a GPU."""
    flat = flatten(x)
    key = threshold_key(threshold, flat.dtype)
    return count_above(bits_of(flat), key - 1) if flat.is_cpu else int((magnitude_keys(flat) >= key).sum())


def threshold_key(threshold: float, dtype: torch.dtype) -> int:
    """The key of the least magnitude of ``dtype`` that is not below ``threshold``."""
    rounded = torch.tensor(threshold, dtype=dtype)
    return int(magnitude_keys(rounded)) + (float(rounded) < threshold)
