"""Maas et al.'s film reviews (ACL 2011): aclImdb/{train,test}/{pos,neg}/ID_RATING.txt, twice 25,000.

Words in small letters, HTML's line breaks left out. 0 is for padding, 1 for words that are not among the most frequent.
"""

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from thinwire_trainer.data import Faults, read_text
from thinwire_trainer.errors import RunError
from torch import Tensor

from thinwire_text.data.corpus import UNKNOWN, Vocabulary, folder_with

SOURCE = "https://ai.stanford.edu/~amaas/data/sentiment/"
PADDING = "<pad>"
BREAK = re.compile(r"<br\s*/?>")
WORDS = re.compile(r"\w+(?:'\w+)*|[!?]")
SIDES = ("neg", "pos")  # label 0, 1


@dataclass(frozen=True, kw_only=True)
class Split:
    """Reviews: their tokens, int64 [≤ length] each, and labels, int64 [reviews]: 1 for praise."""

    tokens: list[Tensor]
    labels: Tensor


@dataclass(frozen=True, kw_only=True)
class Reviews:
    """Both parts, in numbers of the same words."""

    vocabulary: Vocabulary
    train: Split
    test: Split


def words(text: str) -> list[str]:
    """Words of a review as the model reads them."""
    return WORDS.findall(BREAK.sub(" ", text).lower())


def load(data_dir: Path, *, length: int, most: int, faults: Faults) -> Reviews:
    """The reviews, each cut to its first `length` tokens; `most` words."""
    folder = folder_with("train", data_dir=data_dir, places=("aclImdb", "."), source=SOURCE)
    parts = {name: _read(folder / name, length, faults) for name in ("train", "test")}
    counted = Counter(token for tokens, _ in parts["train"] for token in tokens)
    vocabulary = Vocabulary.of(counted, first=(PADDING, UNKNOWN), most=most - 1)
    train, test = (
        Split(tokens=[vocabulary.encode(tokens) for tokens, _ in found], labels=torch.tensor([y for _, y in found]))
        for found in parts.values()
    )
    return Reviews(vocabulary=vocabulary, train=train, test=test)


def _read(folder: Path, length: int, faults: Faults) -> list[tuple[list[str], int]]:
    """Tokens and label of each review, in the order of the files' names."""
    found = []
    for label, side in enumerate(SIDES):
        files = sorted((folder / side).glob("*.txt"))
        if not files:
            raise RunError(f"{folder / side} holds no reviews (ID_RATING.txt): is the archive unpacked as a whole?")
        for path in files:
            with faults.one():
                tokens = words(read_text(path))
                if not tokens:
                    raise RunError(f"{path} has no word")
                found.append((tokens[:length], label))
    if not found:
        raise RunError(f"{folder} holds no review that can be used; {faults.told()}")
    return found
