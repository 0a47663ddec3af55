"""NaN and inf in what a rank has accumulated, so that all ranks learn of them, also where they were not selected."""

from __future__ import annotations

import torch
from sparse_compress import ErrorFeedback, SparseVector
from torch import Tensor


def marked(sent: SparseVector, feedback: ErrorFeedback, name: str) -> SparseVector:
    """What is sent; with a NaN in it where what had accumulated was not finite and none of that was selected.

    A selection by magnitude takes NaN and inf first, any other may leave them behind.
    """
    if name not in feedback.suspects() or not bool(torch.isfinite(sent.values).all()):
        return sent
    values = sent.values.clone()
    values[0] = torch.nan
    return SparseVector(sent.indices, values, sent.numel)


def suspect_element(sent: SparseVector, residual: Tensor) -> int:
    """The first element of which this rank gave, or has left in its residual, something not finite; -1 if none."""
    position, left_behind = first_nonfinite(sent.values), first_nonfinite(residual.view(-1))
    if position < 0 or left_behind < 0:
        return max(left_behind, -1 if position < 0 else int(sent.indices[position]))
    # Both: a selection by magnitude fills up with NaN in the order of their indices; a mark is a lone first entry.
    marked_only = position == 0 and int((~torch.isfinite(sent.values)).sum()) == 1
    return left_behind if marked_only else min(left_behind, int(sent.indices[position]))


def first_nonfinite(tensor: Tensor) -> int:
    """Its position in a 1-D tensor, -1 if there is none."""
    positions = (~torch.isfinite(tensor)).nonzero()
    return int(positions[0]) if len(positions) else -1
