"""The Penn Treebank as Mikolov prepared it: ptb.train.txt, ptb.valid.txt, ptb.test.txt.

Words stand between spaces, a sentence on a line; every line ends in <eos>. The vocabulary is that of ptb.train.txt,
10,000 with <eos>; what else the other files say is an error.
"""

from collections import Counter
from pathlib import Path

import torch
from torch import Tensor
from trainer.errors import RunError

from text.data.corpus import Corpus
from text.data.files import folder_with, read_text
from text.data.vocabulary import END, Vocabulary

PLACES = (".", "ptb", "simple-examples/data")  # the last is the published archive's
SOURCE = "http://www.fit.vutbr.cz/~imikolov/rnnlm/simple-examples.tgz"


def load(data_dir: Path, *, held_out: str = "test", skip_bad: bool = False) -> Corpus:
    """The corpus. held_out: "test" or "valid". skip_bad: leaves out lines that have words that training has not."""
    folder = folder_with("ptb.train.txt", data_dir=data_dir, places=PLACES, source=SOURCE)
    lines = [[*line.split(), END] for line in _lines(folder / "ptb.train.txt")]
    vocabulary = Vocabulary.of(Counter(token for line in lines for token in line))
    train = vocabulary.encode(token for line in lines for token in line)
    test, skipped = _encoded(folder / f"ptb.{held_out}.txt", vocabulary, skip_bad=skip_bad)
    return Corpus(vocabulary=vocabulary, train=train, test=test, skipped=skipped)


def _lines(path: Path) -> list[str]:
    return [line for line in read_text(path).split("\n") if line.strip()]


def _encoded(path: Path, vocabulary: Vocabulary, *, skip_bad: bool) -> tuple[Tensor, int]:
    """Tokens of the lines, and the number of those that were left out."""
    parts, skipped = [], 0
    for number, line in enumerate(_lines(path), 1):
        tokens = line.split()
        unknown = next((token for token in tokens if token not in vocabulary.numbers), None)
        if unknown is None:
            parts.append(vocabulary.encode([*tokens, END]))
        elif skip_bad:
            skipped += 1
        else:
            raise RunError(
                f"{path}, line {number}: {unknown:.40} is not a word of ptb.train.txt: take files of one kind, or "
                f"leave such lines out with --skip-bad"
            )
    if not parts:
        raise RunError(f"{path} has no line whose words are all in ptb.train.txt")
    return torch.cat(parts), skipped
