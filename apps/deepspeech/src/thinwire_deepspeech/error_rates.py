"""Word and character errors, as jiwer counts them: substitutions, deletions and insertions of the shortest edit."""

from collections.abc import Sequence
from typing import NamedTuple

import jiwer


class Errors(NamedTuple):
    """Sums over utterances: edits, and what there was to be said."""

    word_edits: int
    words: int
    character_edits: int
    characters: int


def errors(said: Sequence[str], heard: Sequence[str]) -> Errors:
    """Count errors of what was heard instead of the texts in `said`, none of which is empty, pair by pair."""
    if not said:
        return Errors(0, 0, 0, 0)
    words = jiwer.process_words(list(said), list(heard))
    characters = jiwer.process_characters(list(said), list(heard))
    return Errors(*_counts(words), *_counts(characters))


def _counts(found: jiwer.WordOutput | jiwer.CharacterOutput) -> tuple[int, int]:
    edits = found.substitutions + found.deletions + found.insertions
    return edits, found.hits + found.substitutions + found.deletions
