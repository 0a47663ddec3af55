"""What a round of a partial allreduce gives, the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class PartialResult:
    """One round, to be applied once and in order.

    total: the sum over all that was contributed, weights included; a tensor, or a list of them, as `like` was.
    round: its number, the same on all ranks; numbers are left out where nobody had anything to give.
    contributors: the ranks of which something is in the total. fresh: those that did not come too late for this round;
        of the others only earlier gradients are in it.
    staleness: for each rank, how many rounds in a row up to this one nothing of it was in; 0 for those that have ended.
    deposits: how many gradients are in the total. weight: the sum of their weights.
    nonfinite: the ranks that contributed NaN or inf.
    members: the ranks that took part, with a gradient or without: all that were not known to be dead. As many ranks is
        what a mean is divided by.
    """

    total: Tensor | list[Tensor]
    round: int
    contributors: tuple[int, ...]
    fresh: tuple[int, ...]
    staleness: tuple[int, ...]
    deposits: int
    weight: float
    nonfinite: tuple[int, ...]
    members: tuple[int, ...]
