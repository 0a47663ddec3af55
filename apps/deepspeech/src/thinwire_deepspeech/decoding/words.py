"""When each word is said, from the path that says the text."""

from collections.abc import Sequence
from typing import NamedTuple

from thinwire_deepspeech.decoding.alphabet import SPACE, decoded
from thinwire_deepspeech.decoding.greedy import LogProbabilities
from thinwire_deepspeech.decoding.paths import likeliest_path


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
