"""Parameters as a few flat vectors, in which the algorithms compute."""

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

    kept: the algorithm's state between boundaries, by its name there.
    remainder: rounding error of x in parameters of fewer bits, which belongs to x; None where there is none.
    weight: sum over ranks in the mean at this boundary: the number of ranks that gave one, where they are not weighted.
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
        """Copies x out of the parameters."""
        x = self.bucket.gather(self.tensors)
        return x if self.remainder is None else x.add_(self.remainder)

    def put(self, x: Tensor) -> None:
        """Copies x into the parameters."""
        self.show(x)
        if self.remainder is not None:
            self.remainder = x - self.bucket.gather(self.tensors)

    def show(self, x: Tensor) -> None:
        """Copies x into the parameters for a while only: its rounding error is forgotten."""
        self.bucket.scatter(x, self.tensors)

    def draft(self) -> Part:
        """Copies the part with its state, which may then be changed without consequence."""
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
    """Cuts all trained parameters into parts of at most `nbytes` each; a larger tensor is a part by itself.

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
    """Puts `models`, one for each part, into the parameters inside the block; then their own values, bit for bit."""
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
