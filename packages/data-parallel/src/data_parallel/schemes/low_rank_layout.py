"""Layout of a bucket for PowerSGD, decided by shapes alone: members taken as matrices, and spans of the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from communicators import Bucket
from torch import Tensor

from data_parallel.schemes.residuals import laid_out

Shapes = Sequence[torch.Size]


@dataclass(frozen=True, eq=False)
class Layout:
    """Layout of one bucket, made once.

    low_rank: by member, whether it is a matrix. matrices: their positions in the optimizer's list. spans: of each dense
    member, [low, high) in the bucket and its start in the message. facts: facts that all ranks share.
    """

    bucket: Bucket
    low_rank: list[bool]
    matrices: list[int]
    spans: list[tuple[int, int, int]]
    facts: str

    def views(self, flat: Tensor) -> list[Tensor]:
        """The matrices, in their tensors' shapes."""
        return [view for view, found in zip(self.bucket.views(flat), self.low_rank, strict=True) if found]

    def whole(self, flat: Tensor) -> Tensor:
        """Dense members, one after the other."""
        return torch.cat([flat[:0], *(flat[low:high] for low, high, _ in self.spans)])


def layout_of(bucket: Bucket, columns: int | None) -> Layout:
    """columns: r of P and Q; None: all goes whole."""
    low_rank = [columns is not None and is_matrix(shape, columns) for shape in bucket.shapes]
    spans, at = [], 0
    for (low, high), found in zip(laid_out(bucket), low_rank, strict=True):
        if not found:
            spans.append((low, high, at))
            at += high - low
    dtype, sizes = torch.promote_types(bucket.dtype, torch.float32), powersgd_elements(bucket.shapes, columns)
    facts = f"powersgd(rank={columns}, numel={bucket.numel}, {dtype}, elements={sizes})"
    matrices = [member for member, found in zip(bucket.members, low_rank, strict=True) if found]
    return Layout(bucket, low_rank, matrices, spans, facts)


def powersgd_elements(shapes: Shapes, columns: int | None) -> tuple[int, int]:
    """Elements of the two sums of a bucket: Σ n·r and what goes whole, Σ m·r; all of them in the first without r."""
    first = second = 0
    for shape in shapes:
        if columns is not None and is_matrix(shape, columns):
            n, m = rows_and_columns(shape)
            first, second = first + n * columns, second + m * columns
        else:
            first += shape.numel()
    return first, second


def is_matrix(shape: torch.Size, columns: int) -> bool:
    """Whether P and Q of it have fewer elements than it has: (n + m)·r < n·m."""
    if len(shape) < 2 or not shape.numel():
        return False
    n, m = rows_and_columns(shape)
    return (n + m) * columns < n * m


def rows_and_columns(shape: torch.Size) -> tuple[int, int]:
    """A tensor as a matrix: its first dimension by the others."""
    return shape[0], shape.numel() // shape[0]
