"""Orthonormal columns, in the same bits on every processor, so that ranks need not agree on them by a message.

Sums are by halving, of elementwise products, which IEEE 754 rounds alike everywhere; a library's dot product or QR adds
in an order that depends on the processor and its threads.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

DEPENDENT = 1e-12
"""Share of its length that is left of a column that depends on the earlier ones: it becomes zeros."""


def orthonormal(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Orthonormalises the columns of (n, r) matrices by modified Gram-Schmidt, twice, in float64; r is common to all.

    Columns that depend on earlier ones become zeros; NaN and inf make all later columns NaN. Matrices of similar length
    are processed together, padded with zeros: few operations, at most twice the memory.
    """
    done: dict[int, Tensor] = {}
    by_length: dict[int, list[int]] = {}
    for position, matrix in enumerate(matrices):
        by_length.setdefault((len(matrix) - 1).bit_length(), []).append(position)
    for bits, positions in by_length.items():
        first = matrices[positions[0]]
        columns = first.new_zeros((len(positions), first.shape[1], 1 << bits), dtype=torch.float64)
        for row, position in zip(columns, positions, strict=True):
            row[:, : len(matrices[position])] = matrices[position].T
        _orthonormalise(columns)
        for row, position in zip(columns, positions, strict=True):
            done[position] = row[:, : len(matrices[position])].T.to(first.dtype).contiguous()
    return [done[position] for position in range(len(matrices))]


def outer_sum(p: Tensor, q: Tensor) -> Tensor:
    """p qᵀ for (n, r) and (m, r), the columns' products added in order: the same bits on every processor."""
    p, q = p.T.contiguous(), q.T.contiguous()  # columns that lie together: a third of the time at r = 4
    total = torch.outer(p[0], q[0])
    product = torch.empty_like(total)
    for a, b in zip(p[1:], q[1:], strict=True):
        total += torch.outer(a, b, out=product)
    return total


def _orthonormalise(columns: Tensor) -> None:
    """(matrices, r, n) in place, n a power of two."""
    for j in range(columns.shape[1]):
        v = columns[:, j]
        before = _dot(v, v).sqrt()
        for _ in range(2):  # rounding leaves some of the earlier columns after the first time
            for i in range(j):
                v = v - _dot(columns[:, i], v) * columns[:, i]
        after = _dot(v, v).sqrt()
        columns[:, j] = torch.where(after <= DEPENDENT * before, 0.0, v / after)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """(matrices, n) twice -> (matrices, 1)."""
    products = a * b
    while (length := products.shape[1]) > 1:
        products = products[:, : length // 2] + products[:, length // 2 :]
    return products
