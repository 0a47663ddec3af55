"""A text to model, as numbers of its tokens."""

from dataclasses import dataclass

from torch import Tensor

from thinwire_text.data.vocabulary import Vocabulary


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """train, test: int64 [tokens]."""

    vocabulary: Vocabulary
    train: Tensor
    test: Tensor
