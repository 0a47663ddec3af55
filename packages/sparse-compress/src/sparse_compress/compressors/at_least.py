"""Selection by a given threshold, cut to a bound, shared by the threshold compressors."""

import torch
from torch import Tensor

from sparse_compress.arguments import flatten
from sparse_compress.magnitude import magnitude_keys
from sparse_compress.topk import reaching, topk
from sparse_compress.vector import SparseVector


def select_at_least(x: Tensor, threshold: float, k: int) -> SparseVector:
    """Elements of ``x`` whose magnitude reaches ``threshold``, the k largest of them where they are more.

    NaN and inf reach any threshold. A tensor with a non-zero element never gives an empty vector: the largest is sent
    where none reaches; an all-zero one gives none where ``threshold`` > 0. On a GPU their number is read back.
    """
    flat = flatten(x)
    if not len(flat) or not k:
        return topk(flat, 0)
    selected = reaching(flat, threshold_key(threshold, flat.dtype), k)
    if len(selected):
        return selected
    only = topk(flat, 1)
    return only if bool(only.values.any()) else topk(flat, 0)


def count_at_least(x: Tensor, threshold: float) -> int:
    """Number of elements of ``x`` with a magnitude of at least ``threshold`` > 0; read back from a GPU."""
    flat = flatten(x)
    key = threshold_key(threshold, flat.dtype)
    return int((magnitude_keys(flat) >= key).sum())


def threshold_key(threshold: float, dtype: torch.dtype) -> int:
    """Key of the least magnitude of ``dtype`` that is not below ``threshold``."""
    rounded = torch.tensor(threshold, dtype=dtype)
    return int(magnitude_keys(rounded)) + (float(rounded) < threshold)
