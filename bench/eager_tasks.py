"""What `bench eager` trains: tasks whose steps take unlike times, fixed in advance, as in Eager-SGD's evaluation.

Each is on `ranks` ranks, with `steps` steps of each. target: the test accuracy to be reached. rate: of learning. every:
rounds between looks at the accuracy.
"""

import string
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from partial_collectives import injected_delays
from torch import Tensor, nn

from bench.convergence.tasks import digits


class Digits:
    """scikit-learn's digits, 1,437 to train with and 360 to test; a step takes 0.5 s, on one rank of 16, drawn anew in
    each step, 0.32 s more (the paper: on two of 64)."""

    name, ranks, steps, target, rate, every = "digits", 16, 200, 0.95, 0.05, 5

    def model(self) -> nn.Module:
        """A new one."""
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def seconds(self, seed: int, rank: int) -> list[float]:
        """Of each step of a rank."""
        late = injected_delays("random:1=0.32", rank, self.ranks, seed=seed)
        return [0.5 + late(step) for step in range(self.steps)]

    def loss(self, model: nn.Module, seed: int, rank: int, step: int) -> Tensor:
        """Of this rank's batch."""
        images, labels, _, _ = digits()
        batch = torch.randint(len(labels), (8,), generator=_draw(seed, rank, step))
        return nn.functional.cross_entropy(model(images[batch]), labels[batch])

    def accuracy(self, model: nn.Module) -> float:
        """On the test samples."""
        _, _, images, labels = digits()
        with torch.no_grad():
            return float((model(images).argmax(1) == labels).float().mean())


LENGTHS = (4, 8, 12, 16, 24, 32, 48, 64)


class Text:
    """The next character of Python's own help texts, by an LSTM. A step takes as long as its sequences: 0.2 … 3.2 s,
    about as of the paper's videos; a rank's length is drawn for each step."""

    name, ranks, steps, target, rate, every = "lstm", 8, 480, 0.45, 0.5, 5

    def model(self) -> nn.Module:
        """A new one."""
        return NextCharacter()

    def seconds(self, seed: int, rank: int) -> list[float]:
        """Of each step of a rank."""
        return [0.05 * self._length(seed, rank, step) for step in range(self.steps)]

    def loss(self, model: nn.Module, seed: int, rank: int, step: int) -> Tensor:
        """Mean of this rank's batch over characters, so that short batches count as much as long ones."""
        text, length = _text()[:-20_000], self._length(seed, rank, step)
        starts = torch.randint(len(text) - length - 1, (8,), generator=_draw(seed, rank, step))
        windows = torch.stack([text[start : start + length + 1] for start in starts.tolist()])
        return nn.functional.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())

    def accuracy(self, model: nn.Module) -> float:
        """On the test samples."""
        windows = _text()[-20_000:].view(-1, 40)[::8]
        with torch.no_grad():
            return float((model(windows[:, :-1]).argmax(2) == windows[:, 1:])[:, 8:].float().mean())

    def _length(self, seed: int, rank: int, step: int) -> int:
        return LENGTHS[int(torch.randint(len(LENGTHS), (), generator=_draw(seed, rank, step + 1_000_000)))]


class NextCharacter(nn.Module):
    """Scores of the next character, for every place of [batch, length] characters."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        kinds = len(ALPHABET) + 1
        self.embed = nn.Embedding(kinds, 16)
        self.lstm = nn.LSTM(16, width, batch_first=True)
        self.out = nn.Linear(width, kinds)

    def forward(self, characters: Tensor) -> Tensor:
        """[batch, length, kinds]"""
        scores: Tensor = self.out(self.lstm(self.embed(characters))[0])
        return scores


class Speech:
    """Synthetic spoken digits, one to four an utterance, in batches of any lengths: nobody is slowed down on purpose. A
    step takes as long as its batch's longest utterance, to which the others are padded; `PER_FRAME` and `PER_STEP` are
    as measured on one core. accuracy: words that are right, less those that are too many."""

    name, ranks, epochs, batch, target, rate, every = "speech", 8, 4, 2, 0.7, 0.06, 10
    PER_FRAME, PER_STEP = 88e-6, 5e-3  # seconds of forward, backward and update

    @property
    def steps(self) -> int:
        """Of all epochs."""
        return self.epochs * len(self._batches(0, 0, 0))

    def model(self) -> nn.Module:
        """A new one."""
        from thinwire_deepspeech.decoding import LABELS
        from thinwire_deepspeech.model import DeepSpeech2, small

        return DeepSpeech2(small(), labels=len(LABELS))

    def seconds(self, seed: int, rank: int) -> list[float]:
        """Of each step of a rank."""
        lengths = _speech()[1]
        batches = [batch for epoch in range(self.epochs) for batch in self._batches(seed, rank, epoch)]
        return [self.PER_STEP + self.PER_FRAME * len(batch) * int(lengths[batch].max()) for batch in batches]

    def loss(self, model: nn.Module, seed: int, rank: int, step: int) -> Tensor:
        """Mean of this rank's batch over characters."""
        epoch, place = divmod(step, self.steps // self.epochs)
        log_probabilities, lengths, heard = self._heard(model, _speech()[0], self._batches(seed, rank, epoch)[place])
        return nn.functional.ctc_loss(log_probabilities, heard.labels, lengths, heard.label_lengths)

    def accuracy(self, model: nn.Module) -> float:
        """On the test samples."""
        from thinwire_deepspeech.recognition import errors, heard_in

        with torch.no_grad():
            log_probabilities, lengths, heard = self._heard(model.eval(), _speech()[2], torch.arange(50))
        model.train()
        counted = errors(heard.transcripts, heard_in(log_probabilities, lengths))
        return 1 - counted.word_edits / counted.words

    def _batches(self, seed: int, rank: int, epoch: int) -> list[Tensor]:
        from thinwire_deepspeech.data.utterances import shuffled

        random = np.random.default_rng([seed, epoch])
        return shuffled(_speech()[1], rank=rank, size=self.ranks, batch_size=self.batch, random=random)

    def _heard(self, model: nn.Module, utterances: Any, indices: Tensor) -> tuple[Tensor, Tensor, Any]:
        from thinwire_deepspeech.data.utterances import batch_of

        chosen = [utterances[index] for index in indices.tolist()]
        batch = batch_of([utterance for utterance, _ in chosen], [sound for _, sound in chosen])
        return *model(batch.spectrograms, batch.lengths), batch


Task = Digits | Text | Speech
TASKS: dict[str, Task] = {task.name: task for task in (Digits(), Text(), Speech())}


def ideal(task: Task, seed: int) -> float:
    """Bound of a speed-up: steps as long as their slowest rank, against every rank at its own mean pace."""
    table = [task.seconds(seed, rank) for rank in range(task.ranks)]
    slowest: float = sum(max(step) for step in zip(*table, strict=True))
    return slowest / max(sum(own) for own in table)


ALPHABET = string.ascii_lowercase + string.digits + " \n.,:;()[]'\"`_-="


@cache
def _text() -> Tensor:
    """As numbers; capitals are small, what is not in the alphabet is one more kind."""
    known = {character: number for number, character in enumerate(ALPHABET)}
    text = "".join(topics[name] for name in sorted(topics)).lower()[:300_000]
    return torch.tensor([known.get(character, len(ALPHABET)) for character in text])


@cache
def _speech() -> tuple[Any, npt.NDArray[np.int64], Any]:
    """Training utterances with their spectrograms, their frames, test utterances likewise."""
    from thinwire_deepspeech.data.spoken_digits import SPEEDS_AND_PITCHES, load
    from thinwire_deepspeech.data.utterances import frame_counts
    from thinwire_deepspeech.sound import spectrogram
    from thinwire_trainer.data import Faults

    corpus = load(Path("data"), faults=Faults(skip=False))
    train, test = (
        [(utterance, spectrogram(utterance.read())) for utterance in part]
        for part in (corpus.train, corpus.tests[SPEEDS_AND_PITCHES])
    )
    return train, frame_counts(corpus.train), test


def _draw(seed: int, rank: int, step: int) -> torch.Generator:
    return torch.Generator().manual_seed((seed << 40) + (rank << 24) + step)
