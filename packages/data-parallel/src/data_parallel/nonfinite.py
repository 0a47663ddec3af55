"""Errors that name the rank and parameter of a NaN or inf, the same on every rank."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from communicators import Bucket, CollectiveError, Communicator, Schedule, schedules
from torch import Tensor


def culprit(
    found: int, bucket: Bucket, names: Sequence[str], comm: Communicator, what: str
) -> Schedule[CollectiveError]:
    """The error that every rank is to raise where a bucket's total is not finite.

    All ranks see the same total, so all enter this gather of 8 bytes a rank: each tells which parameter of its own was
    not finite. found: the first such element of this rank's flat gradient, -1 if none. what: name of what is exchanged.
    """
    ends = accumulate(shape.numel() for shape in bucket.shapes)
    member = -1 if found < 0 else next(m for m, end in zip(bucket.members, ends, strict=True) if found < end)
    own = torch.tensor([member], device=bucket.device).view(torch.uint8)
    blocks = yield from schedules.allgather_blocks(own, [own.numel()] * comm.size, comm.rank, comm.size)
    return _error([int(block.clone().view(torch.int64)) for block in blocks], names, what)


def unlawful(what: str, rank: int) -> CollectiveError:
    """Error for a NaN that would wait in one rank's residual, unknown to the others."""
    return CollectiveError(
        f"{what}: what rank {rank} is to keep is not finite although the total is; an algorithm must let NaN and inf "
        "of any rank show in the total"
    )


def first_nonfinite(tensor: Tensor) -> int:
    """Position of the first non-finite element of a 1-D tensor, -1 if there is none."""
    positions = (~torch.isfinite(tensor)).nonzero()
    return int(positions[0]) if len(positions) else -1


def _error(culprits: Sequence[int], names: Sequence[str], what: str) -> CollectiveError:
    how_to_skip = "with nonfinite='skip' (DistributedOptimizer; --nonfinite skip) or a grad_scaler (SparseHookState)"
    made = "" if what == "gradient" else ", in its gradient or the wrapped optimizer's settings"
    for rank, position in enumerate(culprits):
        if position >= 0:
            return CollectiveError(
                f"rank {rank}: the {what} of {names[position]!r} is not finite (NaN or inf), so no rank took the "
                f"step; look for its cause there{made}, or skip such steps {how_to_skip}"
            )
    return CollectiveError(
        f"every rank's {what} is finite, but not their sum: it overflowed, so no rank took the step; clip them, lower "
        f"the loss scale, take a wire of more range than fp16, or skip such steps {how_to_skip}"
    )
