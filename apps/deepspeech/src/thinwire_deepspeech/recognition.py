"""Speech recognition as the trainer's task."""

import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jiwer
import numpy as np
import torch
from thinwire_trainer.command_line.options import Options
from thinwire_trainer.data import Faults, fingerprint
from thinwire_trainer.errors import RunError
from thinwire_trainer.launching.device import pinned
from thinwire_trainer.training.batches import SHUFFLE, derived_seed
from torch import Generator, Tensor
from torch.nn.functional import ctc_loss

from thinwire_deepspeech.catalogue import DATASETS, MODELS
from thinwire_deepspeech.data.utterances import (
    Batch,
    Corpus,
    Utterance,
    batch_of,
    bucketed,
    frame_counts,
    shuffled,
    sorted_batches,
)
from thinwire_deepspeech.decoding import LABELS, decoded, frames_needed, greedy
from thinwire_deepspeech.model import DeepSpeech2, Size
from thinwire_deepspeech.sound import HOP, RATE, spec_augment, spectrogram

TEST_BATCH = 32  # utterances
SUMS = ("loss", "utterances", "word_edits", "words", "character_edits", "characters")  # of each group of tests


class Tested(NamedTuple):
    """A test batch: these utterances of a group, by its number."""

    group: int
    indices: Tensor


class Errors(NamedTuple):
    """Sums over utterances: edits (substitutions, deletions and insertions, as jiwer counts), and what was said."""

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


@dataclass(frozen=True, kw_only=True)
class Recognition:
    """A model that writes utterances down; a `thinwire_trainer.app.Task` with batches of its own, read ahead."""

    model: DeepSpeech2
    corpus: Corpus
    faults: Faults
    device: torch.device
    bucketing: bool
    augmented: bool

    @property
    def train_size(self) -> int:
        """Training utterances."""
        return len(self.corpus.train)

    @property
    def test_size(self) -> int:
        """Test utterances, of all groups."""
        return sum(len(group) for group in self.corpus.tests.values())

    def train_batches(self, *, rank: int, size: int, batch_size: int, seed: int, epoch: int) -> Sequence[Tensor]:
        """Batches of indices (`thinwire_trainer.app.Batches`)."""
        deal = bucketed if self.bucketing else shuffled
        lengths = frame_counts(self.corpus.train)
        random = np.random.Generator(np.random.PCG64(derived_seed(seed, SHUFFLE, epoch)))
        return deal(lengths, rank=rank, size=size, batch_size=batch_size, random=random)

    def test_batches(self, *, rank: int, size: int) -> Sequence[Tested]:
        """Batches by group (`thinwire_trainer.app.Batches`)."""
        return [
            Tested(number, indices)
            for number, group in enumerate(self.corpus.tests.values())
            for indices in sorted_batches(frame_counts(group), rank=rank, size=size, batch_size=TEST_BATCH)
        ]

    def weight(self, batch: Tensor) -> int:
        """Utterances."""
        return len(batch)

    def read_train(self, indices: Tensor, seed: int) -> Batch:
        """These training utterances; what SpecAugment blots out is a function of seed and index."""
        chosen = [self.corpus.train[index] for index in indices.tolist()]
        heard = [spectrogram(utterance.heard()) for utterance in chosen]
        if self.augmented:
            keys = [np.random.default_rng([seed, index]) for index in indices.tolist()]
            heard = [spec_augment(each, key) for each, key in zip(heard, keys, strict=True)]
        return self._pinned(batch_of(chosen, heard))

    def read_test(self, tested: Tested) -> Batch:
        """These test utterances."""
        group = list(self.corpus.tests.values())[tested.group]
        chosen = [group[index] for index in tested.indices.tolist()]
        return self._pinned(batch_of(chosen, [spectrogram(utterance.heard()) for utterance in chosen], tested.group))

    def loss(self, batch: Batch, generator: Generator) -> Tensor:
        """−log P(transcript | sound), the mean over utterances."""
        del generator  # augmentation has keys
        return self._losses(batch)[0] / len(batch.lengths)

    def score(self, batch: Batch) -> Tensor:
        """`SUMS` over the utterances, in the places of their group."""
        sums = torch.zeros(len(self.corpus.tests), len(SUMS), dtype=torch.float64)
        if len(batch.lengths):
            loss, log_probabilities, lengths = self._losses(batch)
            counts = errors(batch.transcripts, heard_in(log_probabilities, lengths))
            sums[batch.group] = torch.tensor([loss.item(), len(lengths), *counts], dtype=torch.float64)
        return sums.flatten()

    def metrics(self, sums: Tensor) -> dict[str, float]:
        """test_loss, wer and cer (0 … 1, or more) of the first group; wer and cer of the others, by name."""
        found: dict[str, float] = {}
        for name, group in zip(self.corpus.tests, sums.view(-1, len(SUMS)).tolist(), strict=True):
            of = dict(zip(SUMS, group, strict=True))
            after = f"_{name.replace(' ', '_').replace('-', '_')}" if found else ""
            if not found:
                found["test_loss"] = of["loss"] / of["utterances"]
            found[f"wer{after}"] = of["word_edits"] / of["words"]
            found[f"cer{after}"] = of["character_edits"] / of["characters"]
        return found

    def kept(self) -> dict[str, Any]:
        """Meaning of the model's numbers, and fingerprints of these utterances.

        That is their transcripts and lengths: to read all the sound would take as long as an epoch.
        """
        tests = [utterance for group in self.corpus.tests.values() for utterance in group]
        return {
            "labels": LABELS,
            "rate": RATE,
            "train_data": fingerprint(f"{each.samples} {each.transcript}" for each in self.corpus.train),
            "test_data": fingerprint(f"{each.samples} {each.transcript}" for each in tests),
        }

    def _losses(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """The sum of the utterances' losses, and what the model gives.

        No infinity is hidden: transcripts that are too long for their sound were found when the data were loaded.
        """
        sound = batch.spectrograms.to(self.device, non_blocking=True)
        log_probabilities, lengths = self.model(sound, batch.lengths)
        labels = batch.labels.to(self.device, non_blocking=True)
        loss = ctc_loss(log_probabilities, labels, lengths, batch.label_lengths, reduction="sum")
        return loss, log_probabilities, lengths

    def _pinned(self, batch: Batch) -> Batch:
        """The parts that a GPU fetches."""
        spectrograms, labels = pinned((batch.spectrograms, batch.labels), self.device)
        return batch._replace(spectrograms=spectrograms, labels=labels)


def heard_in(log_probabilities: Tensor, lengths: Tensor) -> list[str]:
    """The greedy texts of [frames, n, labels]."""
    each = log_probabilities.double().cpu().numpy().swapaxes(0, 1)
    return [decoded(greedy(frames[:length])) for frames, length in zip(each, lengths.tolist(), strict=True)]


def build(options: Options, device: torch.device) -> Recognition:
    """The task that --dnn and --dataset name; RunError where data are missing or damaged, or do not fit the model."""
    faults = Faults(skip=options.app["skip_bad"])
    model = DeepSpeech2(size_of(options), labels=len(LABELS))
    corpus = _fitting(pkgutil.resolve_name(DATASETS[options.dataset])(options.data_dir, faults=faults), model, faults)
    return Recognition(
        model=model.to(device),
        corpus=corpus,
        faults=faults,
        device=device,
        bucketing=options.app["bucketing"],
        augmented=options.app["spec_augment"],
    )


def size_of(options: Options) -> Size:
    """Size of the model that the flags name."""
    both = {"both": True, "forwards": False, None: None}[options.app["directions"]]
    given = {"cell": options.app["rnn"], "hidden": options.app["hidden"], "layers": options.app["layers"]}
    given |= {"bidirectional": both}
    size: Size = pkgutil.resolve_name(MODELS[options.dnn])(
        **{name: value for name, value in given.items() if value is not None}
    )
    return size


def _fitting(corpus: Corpus, model: DeepSpeech2, faults: Faults) -> Corpus:
    """Leave out the utterances whose transcripts are too long for what the model makes of them."""
    tests = {name: _long_enough(group, model, faults) for name, group in corpus.tests.items()}
    fitting = Corpus(train=_long_enough(corpus.train, model, faults), tests=tests)
    if not fitting.train or not all(tests.values()):
        why = f" ({told})" if (told := faults.told()) else ""
        raise RunError(f"no utterance is left to train on, or none to test with{why}")
    return fitting


def _long_enough(utterances: Sequence[Utterance], model: DeepSpeech2, faults: Faults) -> list[Utterance]:
    lengths = model.output_lengths(torch.from_numpy(frame_counts(utterances))).tolist()
    kept = []
    for utterance, length in zip(utterances, lengths, strict=True):
        with faults.one():
            if (needed := frames_needed(utterance.labels)) > length:
                raise RunError(
                    f"{utterance.name}: its {len(utterance.transcript)} characters need {needed} frames, "
                    f"the model makes {length} of its {utterance.samples / RATE:.2f} s: is it cut, or another's?"
                )
            kept.append(utterance)
    return kept


def frame_seconds(size: Size) -> float:
    """How long one frame of a model's output is."""
    return size.stride * HOP / RATE
