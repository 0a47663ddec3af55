"""NaN and inf in what a rank has accumulated, so that all ranks learn of them, also where they were not selected."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from sparse_compress import ErrorFeedback, SparseVector
from sparse_compress.nonfinite import all_finite
from torch import Tensor

from sparse_collectives.training.nonfinite import first_nonfinite


def marked(sent: SparseVector, feedback: ErrorFeedback, name: str, spans: Sequence[slice]) -> tuple[SparseVector, int]:
    """What is sent, and the first element that was not finite in what had accumulated; -1 if none.

    Where there is one all that is sent is NaN, whatever was selected: so it shows in the total however an algorithm
    cuts, rounds and compares. The step is lost anyway; that later ones are not, the parameters in question begin anew:
    nothing of them waits, not even what is finite, which beside an inf may be just as far out.

    spans: of the parameters in the flat tensor.
    """
    if not feedback.is_suspect(name):
        return sent, -1
    residual = feedback.residual(name).view(-1)
    culprit = suspect_element(sent, residual)
    taken = torch.zeros_like(residual).index_put_((sent.indices.long(),), sent.values)
    feedback.drop(name, [span for span in spans if not bool(all_finite(residual[span] + taken[span]))])
    return SparseVector(sent.indices, torch.full_like(sent.values, torch.nan), sent.numel), culprit


def suspect_element(sent: SparseVector, residual: Tensor) -> int:
    """The first element of which this rank selected, or has left in its residual, something not finite; -1 if none."""
    position, left_behind = first_nonfinite(sent.values), first_nonfinite(residual.view(-1))
    found = [element for element in (left_behind, int(sent.indices[position]) if position >= 0 else -1) if element >= 0]
    return min(found, default=-1)
