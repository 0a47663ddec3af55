"""Decoders against brute force: all paths of a few frames are gone through."""

from collections import defaultdict
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from thinwire_deepspeech.decoding import (
    LABELS,
    beam_search,
    decoded,
    encoded,
    frames_needed,
    greedy,
    likeliest_path,
    log_probability,
    unknown,
    words,
)

pytestmark = pytest.mark.quick


@st.composite
def probabilities(draw, *, frames=4, labels=4):
    """[frames, labels], whole numbers before they are scaled, so that ties and sharp frames are often tried."""
    shape = (draw(st.integers(1, frames)), draw(st.integers(2, labels)))
    row = st.lists(st.integers(1, 20), min_size=shape[1], max_size=shape[1])
    weights = np.array(draw(st.lists(row, min_size=shape[0], max_size=shape[0])), float)
    return weights / weights.sum(1, keepdims=True)


def said(path):
    """Another way to say it than ours: a machine that goes from left to right."""
    text, before = [], 0
    for label in path:
        if label not in (0, before):
            text.append(label)
        before = label
    return tuple(text)


def texts(chances):
    """{labels: probability} over all paths."""
    sums = defaultdict(float)
    for path in product(range(chances.shape[1]), repeat=len(chances)):
        sums[said(path)] += np.prod([row[label] for row, label in zip(chances, path, strict=True)])
    return sums


@given(probabilities())
def test_greedy_is_the_likeliest_single_path(chances):
    paths = list(product(range(chances.shape[1]), repeat=len(chances)))
    best = max(paths, key=lambda path: np.prod([row[label] for row, label in zip(chances, path, strict=True)]))
    likeliest = np.prod([row[label] for row, label in zip(chances, best, strict=True)])
    equal = [
        path for path in paths if np.isclose(np.prod([r[i] for r, i in zip(chances, path, strict=True)]), likeliest)
    ]
    assert tuple(greedy(np.log(chances))) in {said(path) for path in equal}


@given(probabilities())
def test_probability_of_a_text_is_the_sum_over_its_paths(chances):
    sums = texts(chances)
    for labels, expected in sums.items():
        assert np.exp(log_probability(np.log(chances), labels)) == pytest.approx(expected, abs=1e-12)
    assert sum(sums.values()) == pytest.approx(1)


@given(probabilities())
def test_beam_search_with_enough_beams_finds_the_likeliest_text(chances):
    sums = texts(chances)
    found = tuple(beam_search(np.log(chances), width=len(sums)))
    assert sums[found] == pytest.approx(max(sums.values()))


@given(probabilities(frames=9, labels=6), st.integers(1, 3))
def test_beam_search_never_scores_below_greedy(chances, width):
    logs = np.log(chances)
    beam, plain = beam_search(logs, width=width), greedy(logs)
    assert log_probability(logs, beam) >= log_probability(logs, plain)


def test_beam_search_adds_paths_up():
    """The example of every CTC tutorial: the likeliest path is all blanks, the likeliest text is not empty."""
    logs = np.log([[0.6, 0.4], [0.6, 0.4]])
    assert greedy(logs) == []
    assert beam_search(logs, width=2) == [1]


@given(probabilities())
def test_path_of_a_text_is_its_likeliest(chances):
    for labels in texts(chances):
        path = likeliest_path(np.log(chances), labels)
        symbols = [0 if place < 0 else labels[place] for place in path]
        assert said(symbols) == labels
        chance = np.prod([row[label] for row, label in zip(chances, symbols, strict=True)])
        every = product(range(chances.shape[1]), repeat=len(chances))
        those = [p for p in every if said(p) == labels]
        assert chance == pytest.approx(max(np.prod([r[i] for r, i in zip(chances, p, strict=True)]) for p in those))


def test_too_many_labels_for_the_frames_have_no_path():
    logs = np.log(np.full((3, 3), 1 / 3))
    assert log_probability(logs, [1, 1, 1]) == -np.inf
    with pytest.raises(ValueError, match="3 labels cannot be said in 3 frames"):
        likeliest_path(logs, [1, 1, 1])
    assert frames_needed([1, 1, 1]) == 5
    assert frames_needed(encoded("HELLO")) == 6


def test_words_have_the_times_of_their_frames():
    path = "__AA_B_ _CC"
    logs = np.log(np.full((len(path), len(LABELS)), 1e-6))
    for frame, character in enumerate(path):
        logs[frame, LABELS.index(character)] = 0
    found = words(logs, greedy(logs), frame=0.5)
    assert [(word.text, word.start, word.end) for word in found] == [("AB", 1.0, 3.0), ("C", 4.5, 5.5)]
    assert words(logs, [], frame=0.5) == []


@given(st.text(alphabet=LABELS[1:], max_size=20))
def test_alphabet_round_trip(text):
    assert decoded(encoded(text)) == text
    assert unknown(text) == ""


def test_unknown_characters_are_named_once():
    assert unknown("ÜBER 7 7") == "Ü7"
    assert unknown("_") == "_"
