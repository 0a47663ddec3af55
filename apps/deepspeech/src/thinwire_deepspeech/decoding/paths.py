"""The paths that say a text: their probability together, and the likeliest of them."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from thinwire_deepspeech.decoding.alphabet import BLANK
from thinwire_deepspeech.decoding.greedy import LogProbabilities

Numbers = npt.NDArray[np.int64]
Values = npt.NDArray[np.float64]


def log_probability(log_probabilities: LogProbabilities, labels: Sequence[int]) -> float:
    """Of all paths that say these labels: the forward variables of Graves et al. 2006. −inf for too few frames."""
    states = _with_blanks(labels)
    forward = _first(log_probabilities, states)
    for frame in log_probabilities[1:]:
        forward = np.logaddexp.reduce(_arriving(forward, states)) + frame[states]
    return float(np.logaddexp.reduce(forward[-2:]))


def likeliest_path(log_probabilities: LogProbabilities, labels: Sequence[int]) -> list[int]:
    """For each frame the place in `labels` of the label that it says, or −1 for a blank (Viterbi).

    ValueError where there are too few frames.
    """
    states = _with_blanks(labels)
    best, came = _first(log_probabilities, states), []
    for frame in log_probabilities[1:]:
        arriving = _arriving(best, states)
        came.append(arriving.argmax(0))
        best = arriving.max(0) + frame[states]
    if best[-2:].max() == -np.inf:
        raise ValueError(f"{len(labels)} labels cannot be said in {len(log_probabilities)} frames")
    state = len(states) - len(best[-2:]) + int(best[-2:].argmax())
    path = [state]
    for steps in reversed(came):
        state -= int(steps[state])
        path.append(state)
    return [state // 2 if state % 2 else -1 for state in reversed(path)]


def _with_blanks(labels: Sequence[int]) -> Numbers:
    """The states of a path: a blank, then each label and a blank [2·n + 1]."""
    states = np.full(2 * len(labels) + 1, BLANK)
    states[1::2] = labels
    return states


def _first(log_probabilities: LogProbabilities, states: Numbers) -> Values:
    """Of paths of one frame, which begin with the first blank or the first label."""
    first = np.full(len(states), -np.inf)
    first[:2] = log_probabilities[0, states[:2]]
    return first


def _arriving(before: Values, states: Numbers) -> Values:
    """What reaches each state from itself, the one before, and two before (a label unlike it) [3, states]."""
    arriving = np.full((3, len(states)), -np.inf)
    arriving[0], arriving[1, 1:] = before, before[:-1]
    skips = (states[2:] != BLANK) & (states[2:] != states[:-2])
    arriving[2, 2:] = np.where(skips, before[:-2], -np.inf)
    return arriving
