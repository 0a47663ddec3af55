"""The English text of Python's own documentation topics, which comes with CPython: a small real corpus, by words.

About 465,000 characters; exactly which depends on Python's version. Topics quote each other, so every paragraph is
taken once, which leaves 366,000; every tenth is for the test. A paragraph ends in <eos>; words that training has fewer
than twice are <unk>.
"""

from collections import Counter
from pathlib import Path

from thinwire_trainer.data import Faults

from thinwire_text.data.corpus import END, UNKNOWN, Corpus, Vocabulary, words

TEST_EVERY = 10
LEAST = 2


def paragraphs() -> list[str]:
    """Each once, in the order of the topics' names."""
    from pydoc_data.topics import topics

    found = (part.strip() for _, text in sorted(topics.items()) for part in text.split("\n\n"))
    return list(dict.fromkeys(part for part in found if part))


def load(data_dir: Path, *, held_out: str = "test", faults: Faults | None = None) -> Corpus:
    """The corpus; no files are needed."""
    del data_dir, held_out, faults
    tokens = [[*words(paragraph), END] for paragraph in paragraphs()]
    train = [token for number, part in enumerate(tokens) if number % TEST_EVERY != TEST_EVERY - 1 for token in part]
    test = [token for part in tokens[TEST_EVERY - 1 :: TEST_EVERY] for token in part]
    vocabulary = Vocabulary.of(Counter(train), first=(END, UNKNOWN), least=LEAST)
    return Corpus(vocabulary=vocabulary, train=vocabulary.encode(train), test=vocabulary.encode(test))
