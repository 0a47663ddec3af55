"""Errors that name the rank and parameter of a NaN or inf, the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from communicators import Bucket, CollectiveError, Schedule, schedules
from sparse_compress.nonfinite import all_finite
from torch import Tensor

from data_parallel.memories import MEMORIES

Checked = tuple[Any, CollectiveError | None]
"""A schedule's result, and the error that every rank is to raise where it is not finite."""


class Suspected(Protocol):
    """Interface of a transfer that `checked` needs."""

    def agreed(self, result: Any) -> Tensor: ...
    def own(self, result: Any) -> Tensor: ...
    def suspect(self) -> int: ...


def checked(
    schedule: Schedule[Any],
    transfer: Suspected,
    bucket: Bucket,
    names: Sequence[str],
    rank: int,
    size: int,
    *,
    where: str,
    what: str,
) -> Schedule[Checked]:
    """The schedule's result and, in the same call, which rank gave what was not finite, where its result is not.

    All ranks see the same total, so all enter this gather of 8 bytes a rank. Where only what this rank is to keep is
    not finite, the algorithm has hidden it from the others: then the call fails, which all of them learn.
    """
    result = yield from schedule
    if bool(all_finite(transfer.agreed(result))):
        if not bool(all_finite(transfer.own(result))):
            raise unlawful(where, rank)
        return result, None
    found = transfer.suspect()
    own = torch.tensor([-1 if found < 0 else _member(bucket, found)], device=bucket.device).view(torch.uint8)
    blocks = yield from schedules.allgather_blocks(own, [own.numel()] * size, rank, size)
    return result, _error([int(block.clone().view(torch.int64)) for block in blocks], names, what)


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


def refuse_nonfinite(state: Mapping[str, Any]) -> None:
    """Raises ValueError, by name, for a memory that would make every later step fail."""
    for memory in MEMORIES:
        for name, kept in state[memory].items():
            if not bool(all_finite(kept)):
                raise ValueError(
                    f"the state's {memory} of {name!r} are not finite (NaN or inf), so no step could be taken with "
                    "it: load an earlier state, or drop them with reshard_residuals(states, size, drop=True)"
                )


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
        f"the sum of the {what}s over the ranks is not finite although every rank's was: it overflowed, so no rank "
        f"took the step; clip the gradients, lower the loss scale or take a wire of more range than fp16, or skip such "
        f"steps {how_to_skip}"
    )


def _member(bucket: Bucket, element: int) -> int:
    """Member that an element of the flat bucket belongs to."""
    for member, shape in zip(bucket.members, bucket.shapes, strict=True):
        if element < shape.numel():
            return member
        element -= shape.numel()
    raise IndexError(f"element {element} is beyond the bucket")
