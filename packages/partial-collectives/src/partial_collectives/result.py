"""Result of a round of a partial allreduce, the same on every rank."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PartialResult:
    """One round, to be applied once and in order.

    Attributes:
        total: The sum over all that was contributed, weights included; a tensor, or a list of them, as `like` was.
        round: Its number, the same on all ranks; numbers are left out where nobody had anything to give.
        fragment: Which of the fragments it is of; 0 where there is one.
        contributors: Ranks that are in the total.
        fresh: Ranks that did not come too late for this round; of the others only earlier gradients are in it.
        staleness: For each rank, the rounds in a row up to this one that nothing of it was in; 0 for those that have
            ended.
        deposits: Number of gradients in the total, but for those that ranks gave to `synchronize` or `finish`; 0 where
            there are no others.
        weight: The sum of their weights.
        nonfinite: The ranks that contributed NaN or inf.
        members: The ranks that took part, with a gradient or without: all that were not known to be dead. A mean is
            divided by their number.
    """

    total: Any
    round: int
    fragment: int
    contributors: tuple[int, ...]
    fresh: tuple[int, ...]
    staleness: tuple[int, ...]
    deposits: int
    weight: float
    nonfinite: tuple[int, ...]
    members: tuple[int, ...]
