"""NaN and inf: whether there are any; in a mean, the same error on every rank, which says whose and where."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from communicators import CollectiveError, Communicator, allgather
from torch import Tensor

from local_sgd.parts import Part


def all_finite(x: Tensor) -> bool:
    """Whether all elements are finite: they are if their sum is, which takes one pass; else it may have overflowed."""
    return bool(torch.isfinite(x.sum())) or bool(torch.isfinite(x).all())


def refuse_nonfinite(parts: Sequence[Part], means: Sequence[Tensor], comm: Communicator, what: str) -> None:
    """Raises CollectiveError, alike on every rank, for means that are not finite; ranks hold the same means."""
    if all(map(all_finite, means)):
        return
    found = [name for part, mean in zip(parts, means, strict=True) for name in _nonfinite(part, mean)]
    own = any(_nonfinite(part, part.gather()) for part in parts)
    ranks = [rank for rank, theirs in enumerate(allgather(torch.tensor([int(own)]), comm)) if int(theirs)]
    if not ranks:
        raise CollectiveError(f"{what}: the sum over ranks overflows in {found[0]!r}: give smaller weights")
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    raise CollectiveError(
        f"{what}: the average is not finite in {found[0]!r}{more}; NaN or inf in the parameters of ranks {ranks}: "
        "nothing was applied; lower the learning rate there, clip gradients, or go back to a checkpoint"
    )


def _nonfinite(part: Part, flat: Tensor) -> list[str]:
    return [name for name, view in part.by_name(flat).items() if not all_finite(view)]
