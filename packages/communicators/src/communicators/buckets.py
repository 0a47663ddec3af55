"""Many tensors as few flat ones: a collective moves one long vector, not a hundred short ones."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch._utils import _unflatten_dense_tensors


@dataclass(frozen=True)
class Bucket:
    """Consecutive spans of one flat tensor, one for each member.

    Attributes:
        members: Positions in the list of tensors that the bucket was made for.
        shapes: Shapes of the members, in the same order.
        dtype: Type of the flat tensor, and of all members.
        device: Device of the flat tensor, and of all members.
        strides: How each member's elements lie in its span, which they fill; empty: all of them row by row.
    """

    members: tuple[int, ...]
    shapes: tuple[torch.Size, ...]
    dtype: torch.dtype
    device: torch.device
    strides: tuple[tuple[int, ...], ...] = ()

    @property
    def numel(self) -> int:
        """Elements of the flat tensor."""
        return sum(shape.numel() for shape in self.shapes)

    def views(self, flat: Tensor) -> list[Tensor]:
        """The members' spans of a flat tensor, in their shapes, no copy."""
        if self._alike:
            return list(_unflatten_dense_tensors(flat, self._alike))  # type: ignore[no-untyped-call]
        spans = flat.split_with_sizes([shape.numel() for shape in self.shapes])
        if not self.strides:
            return [span.view(shape) for span, shape in zip(spans, self.shapes, strict=True)]
        layouts = zip(spans, self.shapes, self.strides, strict=True)
        return [span.as_strided(shape, strides) for span, shape, strides in layouts]

    def gather(
        self, tensors: Sequence[Tensor | None] | Mapping[int, Tensor | None], out: Tensor | None = None
    ) -> Tensor:
        """The members as one flat tensor.

        Args:
            tensors: The full list of tensors, or the members by position; None counts as zeros.
            out: Flat tensor to fill, in place of a new one.
        """
        flat = torch.empty(self.numel, dtype=self.dtype, device=self.device) if out is None else out
        members = [tensors[position] for position in self.members]
        given = [tensor for tensor in members if tensor is not None]
        with torch.no_grad():
            if len(given) == len(members):
                torch._foreach_copy_(self.views(flat), given)
                return flat
            for tensor, view in zip(members, self.views(flat), strict=True):
                view.zero_() if tensor is None else view.copy_(tensor)
        return flat

    def scatter(self, flat: Tensor, tensors: Sequence[Tensor]) -> None:
        """Copies the spans into the members.

        Args:
            flat: Result of `gather`, or a tensor of its size.
            tensors: The full list of tensors.
        """
        members = [tensors[position] for position in self.members]
        with torch.no_grad():
            torch._foreach_copy_(members, self.views(flat))

    @cached_property
    def _alike(self) -> list[Tensor]:
        """Tensors without memory, by which torch cuts the spans in a third of the time; none where it cannot."""
        if self.strides or not all(shape.numel() for shape in self.shapes):
            return []
        return [torch.empty(shape, device="meta") for shape in self.shapes]


def buckets_of(tensors: Sequence[Tensor], nbytes: int | None = None) -> list[Bucket]:
    """Buckets in the tensors' order, one dtype and device each.

    Args:
        tensors: The tensors that the buckets' positions count.
        nbytes: Most bytes that a bucket holds; a larger tensor has its own. None: one bucket for each dtype and
            device.
    """
    if nbytes is not None and nbytes < 1:
        raise ValueError(f"a bucket holds at least 1 byte, got nbytes={nbytes}; None puts everything into one")
    done: list[list[int]] = []
    filling: dict[tuple[torch.dtype, torch.device], tuple[list[int], int]] = {}
    for position, tensor in enumerate(tensors):
        kind = (tensor.dtype, tensor.device)
        size = tensor.numel() * tensor.dtype.itemsize
        members, filled = filling.get(kind, ([], 0))
        if members and nbytes is not None and filled + size > nbytes:
            members, filled = [], 0
        if not members:
            done.append(members)
        members.append(position)
        filling[kind] = (members, filled + size)
    return [_bucket(tensors, members) for members in done]


def _bucket(tensors: Sequence[Tensor], members: list[int]) -> Bucket:
    first = tensors[members[0]]
    return Bucket(tuple(members), tuple(tensors[m].shape for m in members), first.dtype, first.device)
