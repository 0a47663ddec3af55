"""The parameters as a few flat vectors, in which the algorithms compute."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from communicators import Bucket, buckets_of
from torch import Tensor


@dataclass
class Part:
    """Parameters of one group, dtype and device as one vector x of at least 32 bits an element.

    kept: what the algorithm keeps of it between boundaries, by its name there.
    remainder: what was rounded off when x went into parameters of fewer bits, and belongs to x; None where none is.
    weight: of all ranks in the mean at this boundary: how many gave one, where they are not weighted.
    rate, last_rate: the group's learning rate at this boundary and the last one; NaN where it has none.
    """

    names: list[str]
    tensors: list[Tensor]
    bucket: Bucket
    group: int
    kept: dict[str, Tensor] = field(default_factory=dict)
    remainder: Tensor | None = None
    weight: float = 0.0
    rate: float = math.nan
    last_rate: float = 0.0

    def __getitem__(self, name: str) -> Tensor:
        return self.kept[name]

    def gather(self) -> Tensor:
        """x, a copy."""
        x = self.bucket.gather(self.tensors)
        return x if self.remainder is None else x.add_(self.remainder)

    def put(self, x: Tensor) -> None:
        """Copies x into the parameters."""
        self.show(x)
        if self.remainder is not None:
            self.remainder = x - self.bucket.gather(self.tensors)

    def show(self, x: Tensor) -> None:
        """Like `put`, for a while only: what is rounded off is forgotten."""
        self.bucket.scatter(x, self.tensors)

    def draft(self) -> Part:
        """The same with copies of what is kept, to be changed without consequence."""
        return replace(self, kept={name: flat.clone() for name, flat in self.kept.items()})

    def by_name(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of a vector, by parameter."""
        return dict(zip(self.names, self.bucket.views(flat), strict=True))


def parts_of(
    groups: Sequence[Mapping[str, object]],
    trained: Mapping[str, Tensor],
    nbytes: int | None,
    device: torch.device | None,
) -> list[Part]:
    """All trained parameters, none twice, none left out; of at most `nbytes` each (a larger tensor is one of its own).

    device: where vectors live, default the parameters'.
    """
    names = {id(p): name for name, p in trained.items()}
    parts = []
    for position, group in enumerate(groups):
        members = [p for p in group["params"] if id(p) in names]  # type: ignore[attr-defined]
        for bucket in buckets_of(members, nbytes):
            tensors = [members[m] for m in bucket.members]
            parts.append(_part([names[id(p)] for p in tensors], tensors, bucket, position, device))
    return parts


@contextmanager
def shown(parts: Sequence[Part], models: Sequence[Tensor]) -> Iterator[None]:
    """Inside, the parameters are those of `models`, one for each part; afterwards their own again, in all bits."""
    tensors = [tensor for part in parts for tensor in part.tensors]
    own = [tensor.detach().clone() for tensor in tensors]
    try:
        for part, model in zip(parts, models, strict=True):
            part.show(model)
        yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(tensors, own, strict=True):
                tensor.copy_(value)


def _part(names: list[str], tensors: list[Tensor], bucket: Bucket, group: int, device: torch.device | None) -> Part:
    dtype = torch.promote_types(bucket.dtype, torch.float32)
    flat = replace(bucket, members=tuple(range(len(tensors))), dtype=dtype, device=device or bucket.device)
    rounded = torch.zeros(flat.numel, dtype=dtype, device=flat.device) if dtype != bucket.dtype else None
    return Part(names, tensors, flat, group, remainder=rounded)
