"""Word and character errors, worked by hand."""

import pytest
from thinwire_deepspeech.recognition import Errors, errors


@pytest.mark.parametrize(
    ("said", "heard", "expected"),
    [
        ("ONE TWO", "ONE TWO", (0, 2, 0, 7)),
        ("ONE TWO", "", (2, 2, 7, 7)),  # all deleted
        ("ONE TWO", "ONE TOO", (1, 2, 1, 7)),  # one substituted
        ("ONE TWO", "ONE ONE TWO", (1, 2, 4, 7)),  # one inserted
        ("ONE TWO", "TWO", (1, 2, 4, 7)),  # one deleted
        ("A", "B C D", (3, 1, 5, 1)),  # one substituted, two inserted: more than 100 %
        ("SIX SEVEN EIGHT", "SEVEN EIGHT NINE", (2, 3, 9, 15)),  # one deleted, one inserted: not three substituted
    ],
)
def test_by_hand(said, heard, expected):
    assert errors([said], [heard]) == expected


def test_sums_over_utterances():
    assert errors(["ONE TWO", "A"], ["ONE TOO", "B C D"]) == Errors(4, 3, 6, 8)
    assert errors([], []) == Errors(0, 0, 0, 0)
