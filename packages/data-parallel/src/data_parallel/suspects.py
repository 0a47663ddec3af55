"""NaN and inf in a rank's accumulated gradient, made known to all ranks even if they were not selected."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from sparse_compress import ErrorFeedback, SparseVector, all_finite
from torch import Tensor

from data_parallel.nonfinite import first_nonfinite


def marked(sent: SparseVector, feedback: ErrorFeedback, name: str, spans: Sequence[slice]) -> tuple[SparseVector, int]:
    """The entries to send, and the first element of the accumulated gradient that was not finite; -1 if none.

    If there is one, all values sent are NaN, whatever was selected: so it shows in the total, however an algorithm
    cuts, rounds and compares. The step is lost anyway; to save later ones, the parameters in question lose their whole
    residual, even its finite values, which beside an inf may be just as far off.

    spans: spans of the parameters in the flat tensor.
    """
    if not feedback.is_suspect(name):
        return sent, -1
    residual = feedback.residual(name).view(-1)
    culprit = suspect_element(sent, residual)
    taken = torch.zeros_like(residual).index_put_((sent.indices.long(),), sent.values)
    feedback.drop(name, [span for span in spans if not bool(all_finite(residual[span] + taken[span]))])
    return SparseVector(sent.indices, torch.full_like(sent.values, torch.nan), sent.numel), culprit


def suspect_element(sent: SparseVector, residual: Tensor) -> int:
    """First element whose value, selected by this rank or left in its residual, is not finite; -1 if none."""
    position, left_behind = first_nonfinite(sent.values), first_nonfinite(residual.view(-1))
    found = [element for element in (left_behind, int(sent.indices[position]) if position >= 0 else -1) if element >= 0]
    return min(found, default=-1)
