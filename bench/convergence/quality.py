"""When a training is as good as another one at its end."""

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise

from bench.convergence.tasks import TASKS

LOSS, POINTS = 1.01, 1.0  # what the goal leaves


def goal_of(task: str, scores: Sequence[float]) -> float:
    """The score to be reached, of what DDP in bf16 reaches: a perplexity, or percent."""
    mean = statistics.mean(scores)
    return float(mean**LOSS) if TASKS[task].text else mean - POINTS


def steps_until(curve: Sequence[Sequence[float]], goal: float, *, text: bool) -> float:
    """Steps until the curve reaches the goal, on a straight line between two scores; inf if it does not.

    Of text, whose score is a perplexity, the line is that of the loss.
    """
    places = [(step, -math.log(score) if text else score) for step, score, *_ in curve]
    aim = -math.log(goal) if text else goal
    if places[0][1] >= aim:
        return places[0][0]
    for (before, low), (after, high) in pairwise(places):
        if high >= aim:
            return before + (after - before) * (aim - low) / (high - low)
    return math.inf
