"""Sentiment of reviews as the trainer's task."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any, NamedTuple

import torch
from thinwire_trainer.command_line.options import Options
from thinwire_trainer.data import Faults, fingerprint
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from thinwire_text.catalogue import REVIEWS, SENTIMENT
from thinwire_text.data.imdb import Reviews, Split


class Batch(NamedTuple):
    """Tokens int64 [longest, reviews], padded with 0, how many are each review's [reviews], and labels [reviews]."""

    tokens: Tensor
    lengths: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Sentiment:
    """A model that tells praise; a `thinwire_trainer.app.Task` that reads ahead."""

    model: nn.Module
    reviews: Reviews
    device: torch.device
    faults: Faults

    @property
    def train_size(self) -> int:
        """Training reviews."""
        return len(self.reviews.train.labels)

    @property
    def test_size(self) -> int:
        """Test reviews."""
        return len(self.reviews.test.labels)

    def read_train(self, indices: Tensor, seed: int) -> Batch:
        """These training reviews."""
        del seed
        return _read(self.reviews.train, indices)

    def read_test(self, indices: Tensor) -> Batch:
        """These test reviews."""
        return _read(self.reviews.test, indices)

    def loss(self, batch: Batch, generator: Generator) -> Tensor:
        """Mean cross entropy."""
        del generator
        logits, labels = self._classify(batch)
        return cross_entropy(logits, labels)

    def score(self, batch: Batch) -> Tensor:
        """Cross entropy, number told rightly, number: sums."""
        if not len(batch.labels):
            return torch.zeros(3, dtype=torch.float64)
        logits, labels = self._classify(batch)
        right = (logits.argmax(1) == labels).sum()
        loss = cross_entropy(logits.double(), labels, reduction="sum")
        return torch.stack([loss, right.double(), torch.full_like(loss, len(labels))]).cpu()

    def metrics(self, sums: Tensor) -> dict[str, float]:
        """Mean loss, and the share told rightly (0 … 1)."""
        loss, right, number = sums.tolist()
        return {"test_loss": loss / number, "test_accuracy": right / number}

    def kept(self) -> dict[str, Any]:
        """The vocabulary, and what tells these reviews from others."""
        train, test = self.reviews.train, self.reviews.test
        return {
            "tokens": list(self.reviews.vocabulary.tokens),
            "train_data": fingerprint([train.labels, *train.tokens]),
            "test_data": fingerprint([test.labels, *test.tokens]),
        }

    def _classify(self, batch: Batch) -> tuple[Tensor, Tensor]:
        tokens, lengths, labels = (part.to(self.device) for part in batch)
        return self.model(tokens, lengths), labels


def padded(tokens: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """[longest, reviews], with 0 after a review's end, and lengths [reviews]."""
    return pad_sequence(list(tokens)), torch.tensor([len(part) for part in tokens])


def _read(split: Split, indices: Tensor) -> Batch:
    if not len(indices):
        return Batch(torch.zeros(0, 0, dtype=torch.int64), indices, split.labels[indices])
    return Batch(*padded([split.tokens[index] for index in indices.tolist()]), split.labels[indices])


def build(options: Options, device: torch.device) -> Sentiment:
    """The task that --dnn and --dataset name; RunError where data are missing or damaged."""
    flags, faults = options.app, Faults(skip=options.app["skip_bad"])
    load = resolve_name(REVIEWS[options.dataset])
    reviews: Reviews = load(options.data_dir, length=flags["length"], most=flags["vocabulary"], faults=faults)
    model = built(options.dnn, len(reviews.vocabulary), flags)
    return Sentiment(model.to(device), reviews, device, faults)


def built(dnn: str, words: int, flags: Mapping[str, Any]) -> nn.Module:
    """The model of this name, for so many words. flags: the values of the app's own."""
    given = {name: flags[name] for name in ("layers", "hidden", "dropout") if flags[name] is not None}
    model: nn.Module = resolve_name(SENTIMENT[dnn])(words, **given)
    return model
