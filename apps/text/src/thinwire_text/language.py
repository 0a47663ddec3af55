"""Language modelling as the trainer's task: truncated back-propagation through streams of a text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Any, cast

import torch
from thinwire_trainer.command_line.options import Options
from thinwire_trainer.data import Faults, fingerprint
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy

from thinwire_text.catalogue import CORPORA, LANGUAGE
from thinwire_text.data.corpus import Corpus
from thinwire_text.models.language import Language, State
from thinwire_text.streams import Window, test_windows, train_windows


@dataclass
class LanguageModelling:
    """A `thinwire_trainer.app.Task` whose ranks each read --batch-size streams, and carry their state."""

    model: nn.Module  # a `Language`
    corpus: Corpus
    device: torch.device
    window: int
    batch_size: int
    faults: Faults
    state: State = field(init=False)
    test_state: State = field(init=False)

    def __post_init__(self) -> None:
        self.train, self.test = self.corpus.train.to(self.device), self.corpus.test.to(self.device)
        self.state, self.test_state = self._begin(self.batch_size), ()

    @property
    def train_size(self) -> int:
        """Tokens."""
        return len(self.train)

    @property
    def test_size(self) -> int:
        """Tokens."""
        return len(self.test)

    def train_batches(self, *, rank: int, size: int, batch_size: int, seed: int, epoch: int) -> Sequence[Window]:
        """Windows of this rank's streams (`streams.train_windows`)."""
        given = {"rank": rank, "size": size, "batch_size": batch_size, "seed": seed, "epoch": epoch}
        return train_windows(len(self.train), window=self.window, **given)

    def test_batches(self, *, rank: int, size: int) -> Sequence[Window]:
        """Windows of this rank's test streams (`streams.test_windows`)."""
        return test_windows(len(self.test), rank=rank, size=size, window=self.window)

    def weight(self, batch: Window) -> int:
        """Tokens that are foretold."""
        return batch.length * len(batch.origins)

    def loss(self, batch: Window, generator: Generator) -> Tensor:
        """Mean cross entropy of the next token; gradients end at the window's beginning."""
        del generator
        if batch.start == 0:
            self.state = self._begin(len(batch.origins))
        given, wanted = self._read(self.train, batch)
        logits, state = self.model(given, self.state)
        self.state = tuple(part.detach().float() for part in state)
        return cross_entropy(logits.flatten(0, 1), wanted.flatten())

    def score(self, batch: Window) -> Tensor:
        """Cross entropy and number of tokens that are foretold: sums."""
        if not batch.origins:
            return torch.zeros(2, dtype=torch.float64)
        if batch.start == 0:
            self.test_state = self._begin(len(batch.origins))
        given, wanted = self._read(self.test, batch)
        logits, self.test_state = self.model(given, self.test_state)
        loss = cross_entropy(logits.flatten(0, 1).double(), wanted.flatten(), reduction="sum")
        return torch.stack([loss, torch.full_like(loss, wanted.numel())]).cpu()

    def metrics(self, sums: Tensor) -> dict[str, float]:
        """Mean cross entropy (nats a token), and its exponential."""
        loss = sums[0] / sums[1]
        return {"test_loss": float(loss), "perplexity": float(loss.exp())}

    def state_dict(self) -> dict[str, Any]:
        """Hidden state that goes on from window to window."""
        return {"state": list(self.state)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on with it."""
        self.state = tuple(part.to(self.device, copy=True) for part in state["state"])

    def kept(self) -> dict[str, Any]:
        """The vocabulary, and what tells this text from others."""
        return {
            "tokens": list(self.corpus.vocabulary.tokens),
            "train_data": fingerprint([self.corpus.train]),
            "test_data": fingerprint([self.corpus.test]),
        }

    def _begin(self, streams: int) -> State:
        return cast(Language, self.model).begin(streams)

    def _read(self, text: Tensor, batch: Window) -> tuple[Tensor, Tensor]:
        """Tokens [length, streams], and those that follow each."""
        origins = torch.tensor(batch.origins, device=self.device)
        steps = torch.arange(batch.length + 1, device=self.device)
        read = text[origins + batch.start + steps[:, None]]
        return read[:-1], read[1:]


def build(options: Options, device: torch.device) -> LanguageModelling:
    """The task that --dnn and --dataset name; RunError where data are missing or damaged."""
    flags, faults = options.app, Faults(skip=options.app["skip_bad"])
    load = resolve_name(CORPORA[options.dataset])
    corpus: Corpus = load(options.data_dir, held_out=flags["held_out"], faults=faults)
    return LanguageModelling(
        model=built(options.dnn, len(corpus.vocabulary), flags).to(device),
        corpus=corpus,
        device=device,
        window=flags["window"],
        batch_size=options.batch_size,
        faults=faults,
    )


def built(dnn: str, words: int, flags: Mapping[str, Any]) -> nn.Module:
    """The language model of this name, for so many words. flags: the values of the app's own."""
    given = {name: flags[name] for name in ("window", "layers", "hidden", "dropout", "tied") if flags[name] is not None}
    model: nn.Module = resolve_name(LANGUAGE[dnn])(words, **given)
    return model
