"""Text from the model's probabilities: the likeliest labels, by frame or over all paths, and the times of words.

There are the 29 labels of the published code: CTC's blank, the apostrophe, A to Z, and the space.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

BLANK = 0
LABELS = "_'ABCDEFGHIJKLMNOPQRSTUVWXYZ "
SPACE = LABELS.index(" ")
CHARACTERS = LABELS[1:]
_NUMBERS = {character: number for number, character in enumerate(LABELS) if number != BLANK}


def encoded(text: str) -> list[int]:
    """The labels of a text of CHARACTERS."""
    return [_NUMBERS[character] for character in text]


def decoded(labels: Sequence[int]) -> str:
    """The text of labels, without blanks."""
    return "".join(LABELS[label] for label in labels)


def unknown(text: str) -> str:
    """Which of its characters have no label, each once, in order."""
    return "".join(dict.fromkeys(character for character in text if character not in _NUMBERS))


def frames_needed(labels: Sequence[int]) -> int:
    """The fewest frames that can say them: one each, and a blank between two that are alike."""
    return len(labels) + sum(a == b for a, b in pairwise(labels))


LogProbabilities = npt.NDArray[np.float64]
"""[frames, labels], natural logarithms; every frame's probabilities add up to 1."""


def greedy(log_probabilities: LogProbabilities) -> list[int]:
    """The labels of the likeliest path; of equal ones the lowest label."""
    return collapsed(log_probabilities.argmax(1).tolist())


def collapsed(path: list[int]) -> list[int]:
    """Labels that a path of one label a frame says (B of Graves et al. 2006): runs once, then no blanks."""
    starts = [label for frame, label in enumerate(path) if frame == 0 or path[frame - 1] != label]
    return [label for label in starts if label != BLANK]


Numbers = npt.NDArray[np.int64]
Values = npt.NDArray[np.float64]


def log_probability(log_probabilities: LogProbabilities, labels: Sequence[int]) -> float:
    """Log-probability of all paths that say these labels (Graves et al. 2006, forward). −inf for too few frames."""
    states = _with_blanks(labels)
    forward = _first(log_probabilities, states)
    for frame in log_probabilities[1:]:
        forward = np.logaddexp.reduce(_arriving(forward, states)) + frame[states]
    return float(np.logaddexp.reduce(forward[-2:]))


def likeliest_path(log_probabilities: LogProbabilities, labels: Sequence[int]) -> list[int]:
    """Place in `labels` of the label that each frame says, or −1 for a blank (Viterbi).

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
    """Log-probabilities of paths of one frame, which begin with the first blank or the first label."""
    first = np.full(len(states), -np.inf)
    first[:2] = log_probabilities[0, states[:2]]
    return first


def _arriving(before: Values, states: Numbers) -> Values:
    """Probabilities reaching each state from itself, the one before, and two before (a label unlike it) [3, states]."""
    arriving = np.full((3, len(states)), -np.inf)
    arriving[0], arriving[1, 1:] = before, before[:-1]
    skips = (states[2:] != BLANK) & (states[2:] != states[:-2])
    arriving[2, 2:] = np.where(skips, before[:-2], -np.inf)
    return arriving


Prefix = tuple[int, ...]
NEVER = -np.inf


def beam_search(log_probabilities: LogProbabilities, *, width: int) -> list[int]:
    """The likeliest of the best `width` prefixes after the last frame, and of what `greedy` finds.

    Hannun et al. 2014, without the language model. The finalists are weighed over all their paths, also those that the
    search has cut: so more beams can lose a candidate, but the result is never less likely than the greedy one.
    """
    finalists: list[Prefix] = [tuple(greedy(log_probabilities)), *_search(log_probabilities, width)]
    return list(max(dict.fromkeys(finalists), key=partial(log_probability, log_probabilities)))


def _search(log_probabilities: LogProbabilities, width: int) -> list[Prefix]:
    """The best prefixes by the probability of the paths that were kept, which end in a blank or in their last label."""
    beams: dict[Prefix, tuple[float, float]] = {
        (): (0.0, NEVER)
    }  # log P of paths that end in (a blank, the last label)
    for frame in log_probabilities.tolist():
        grown: defaultdict[Prefix, list[float]] = defaultdict(lambda: [NEVER, NEVER])
        for prefix, (blank, label) in beams.items():
            either, last = _sum(blank, label), prefix[-1] if prefix else None
            for symbol, chance in enumerate(frame):
                if symbol == BLANK:
                    _add(grown[prefix], 0, either + chance)
                elif symbol == last:
                    _add(grown[prefix], 1, label + chance)
                    _add(grown[*prefix, symbol], 1, blank + chance)
                else:
                    _add(grown[*prefix, symbol], 1, either + chance)
        best = sorted(grown, key=lambda prefix: (-_sum(*grown[prefix]), prefix))[:width]
        beams = {prefix: (grown[prefix][0], grown[prefix][1]) for prefix in best}
    return list(beams)


def _add(beam: list[float], part: int, value: float) -> None:
    beam[part] = _sum(beam[part], value)


def _sum(a: float, b: float) -> float:
    """log(eᵃ + eᵇ)"""
    return float(np.logaddexp(a, b))


class Word(NamedTuple):
    """start: seconds of its first label's first frame; end: of its last label's last frame's end."""

    text: str
    start: float
    end: float


def words(log_probabilities: LogProbabilities, labels: Sequence[int], *, frame: float) -> list[Word]:
    """The words of labels and their times. frame: seconds of one frame.

    A CTC model says a label about when it is heard, often in one frame: so words seem shorter than they are.
    """
    path = likeliest_path(log_probabilities, labels)
    found = []
    for first, last in _spans(labels):
        said = [number for number, place in enumerate(path) if first <= place <= last]
        found.append(Word(decoded(labels[first : last + 1]), said[0] * frame, (said[-1] + 1) * frame))
    return found


def _spans(labels: Sequence[int]) -> list[tuple[int, int]]:
    """First and last place of each run without a space."""
    places = [place for place, label in enumerate(labels) if label != SPACE]
    starts = [place for place in places if place == 0 or labels[place - 1] == SPACE]
    ends = [place for place in places if place + 1 == len(labels) or labels[place + 1] == SPACE]
    return list(zip(starts, ends, strict=True))
