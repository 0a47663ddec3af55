"""The Penn Treebank as Mikolov prepared it: ptb.train.txt, ptb.valid.txt, ptb.test.txt.

Words stand between spaces, a sentence on a line; every line ends in <eos>. The vocabulary is that of ptb.train.txt,
10,000 with <eos>; what else the other files say is an error.
"""

from collections import Counter
from functools import partial
from pathlib import Path

import torch
from thinwire_trainer.data import Faults, read_text
from thinwire_trainer.errors import RunError
from torch import Tensor

from thinwire_text.data.corpus import END, Corpus, Vocabulary, folder_with

PLACES = (".", "ptb", "simple-examples/data")  # the last is the published archive's
SOURCE = "http://www.fit.vutbr.cz/~imikolov/rnnlm/simple-examples.tgz"


def load(data_dir: Path, *, faults: Faults, held_out: str = "test") -> Corpus:
    """The corpus. held_out: "test" or "valid". A line of it with words that training has not is a fault."""
    folder = folder_with("ptb.train.txt", data_dir=data_dir, places=PLACES, source=SOURCE)
    lines = [[*line.split(), END] for _, line in _lines(folder / "ptb.train.txt")]
    vocabulary = Vocabulary.of(Counter(token for line in lines for token in line))
    train = vocabulary.encode(token for line in lines for token in line)
    test = _encoded(folder / f"ptb.{held_out}.txt", vocabulary, faults)
    return Corpus(vocabulary=vocabulary, train=train, test=test)


def _lines(path: Path) -> list[tuple[int, str]]:
    """Number and text of each line that is not blank."""
    return [(number, line) for number, line in enumerate(read_text(path).split("\n"), 1) if line.strip()]


def _encoded(path: Path, vocabulary: Vocabulary, faults: Faults) -> Tensor:
    """Tokens of the lines."""

    def line_of(number: int, tokens: list[str]) -> Tensor:
        if strange := [token for token in tokens if token not in vocabulary.numbers]:
            place = f"{path}, line {number}"
            raise RunError(f"{place}: {strange[0]:.40} is not a word of ptb.train.txt: take files of one kind")
        return vocabulary.encode([*tokens, END])

    parts = faults.usable(partial(line_of, number, line.split()) for number, line in _lines(path))
    if not parts:
        raise RunError(f"{path} has no line whose words are all in ptb.train.txt")
    return torch.cat(parts)
