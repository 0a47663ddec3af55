"""Which rank and parameter a NaN or inf came from, said alike on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from communicators import Bucket, CollectiveError, Communicator, Schedule, allgather
from communicators.dense import allgather_blocks
from torch import Tensor

from sparse_collectives.exchange import Mean

T = TypeVar("T")


def nonfinite_error(
    means: Sequence[Mean], buckets: Sequence[Bucket], names: Sequence[str], comm: Communicator
) -> CollectiveError:
    """The error that all ranks raise after they have all seen a mean that is not finite.

    One gather of 8 bytes a rank; the lowest rank with a culprit is named, with its first parameter.
    names: of the tensors that the buckets are made of.
    """
    own = torch.tensor([_culprit(means, buckets)], device=comm.device)
    return _error([int(position) for position in allgather(own, comm)], names, "with nonfinite='skip'")


def finite(
    schedule: Schedule[T],
    values: Callable[[T], Tensor],
    suspect: Callable[[], int],
    bucket: Bucket,
    names: Sequence[str],
    rank: int,
    size: int,
) -> Schedule[T]:
    """The schedule's result, or, in the same call, the error that all ranks raise where its values are not finite.

    suspect: finds the first element of the flat bucket of which this rank gave something not finite, -1 if none.
    """
    result = yield from schedule
    if bool(torch.isfinite(values(result)).all()):
        return result
    found = suspect()
    culprit = -1 if found < 0 else _member(bucket, found)
    own = torch.tensor([culprit], device=bucket.device).view(torch.uint8)
    blocks = yield from allgather_blocks(own, [own.numel()] * size, rank, size)
    raise _error([int(block.clone().view(torch.int64)) for block in blocks], names, "by giving a grad_scaler")


def _error(culprits: Sequence[int], names: Sequence[str], how_to_skip: str) -> CollectiveError:
    for rank, position in enumerate(culprits):
        if position >= 0:
            return CollectiveError(
                f"rank {rank}: the gradient of {names[position]!r} is not finite (NaN or inf), so no rank took the "
                f"step; look for its cause there, or skip such steps {how_to_skip}"
            )
    return CollectiveError(
        "the sum of the gradients over the ranks is not finite although every rank's was: it overflowed, so no rank "
        f"took the step; clip the gradients, lower the loss scale or take a wire of more range than fp16, or skip such "
        f"steps {how_to_skip}"
    )


def _culprit(means: Sequence[Mean], buckets: Sequence[Bucket]) -> int:
    """Position among the tensors of the first one of which this rank gave something not finite, -1 if none."""
    found = [_member(bucket, mean.suspect) for mean, bucket in zip(means, buckets, strict=True) if mean.suspect >= 0]
    return min(found, default=-1)


def _member(bucket: Bucket, element: int) -> int:
    """Which tensor an element of the flat bucket belongs to."""
    for member, shape in zip(bucket.members, bucket.shapes, strict=True):
        if element < shape.numel():
            return member
        element -= shape.numel()
    raise IndexError(f"element {element} is beyond the bucket")
