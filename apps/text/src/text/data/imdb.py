"""Maas et al.'s film reviews (ACL 2011): aclImdb/{train,test}/{pos,neg}/ID_RATING.txt, twice 25,000.

Words in small letters, HTML's line breaks left out. 0 is for padding, 1 for words that are not among the most frequent.
"""

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from trainer.errors import RunError

from text.data.files import folder_with, read_text
from text.data.vocabulary import UNKNOWN, Vocabulary

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
    """skipped: files that were left out."""

    vocabulary: Vocabulary
    train: Split
    test: Split
    skipped: int = 0


def words(text: str) -> list[str]:
    """As the model reads them."""
    return WORDS.findall(BREAK.sub(" ", text).lower())


def load(data_dir: Path, *, length: int, most: int, skip_bad: bool = False) -> Reviews:
    """The reviews, each cut to its first `length` tokens; `most` words. skip_bad: leaves out files that are broken."""
    folder = folder_with("train", data_dir=data_dir, places=("aclImdb", "."), source=SOURCE)
    parts = {name: _read(folder / name, length, skip_bad=skip_bad) for name in ("train", "test")}
    counted = Counter(token for tokens, _ in parts["train"][0] for token in tokens)
    vocabulary = Vocabulary.of(counted, first=(PADDING, UNKNOWN), most=most - 1)
    train, test = (
        Split(tokens=[vocabulary.encode(tokens) for tokens, _ in found], labels=torch.tensor([y for _, y in found]))
        for found, _ in parts.values()
    )
    return Reviews(vocabulary=vocabulary, train=train, test=test, skipped=sum(bad for _, bad in parts.values()))


def _read(folder: Path, length: int, *, skip_bad: bool) -> tuple[list[tuple[list[str], int]], int]:
    """Of each review, in the order of its file's name, tokens and label; and the number of files left out."""
    found, skipped = [], 0
    for label, side in enumerate(SIDES):
        files = sorted((folder / side).glob("*.txt"))
        if not files:
            raise RunError(f"{folder / side} holds no reviews (ID_RATING.txt): is the archive unpacked as a whole?")
        for path in files:
            try:
                tokens = words(read_text(path))
                if not tokens:
                    raise RunError(f"{path} has no word")
            except RunError as error:
                if not skip_bad:
                    raise RunError(f"{error}: mend it, or leave such files out with --skip-bad") from None
                skipped += 1
            else:
                found.append((tokens[:length], label))
    if not found:
        raise RunError(f"{folder} holds no review that can be used")
    return found, skipped
