"""The 29 labels of the published code: CTC's blank, the apostrophe, A to Z, and the space."""

from collections.abc import Sequence
from itertools import pairwise

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
