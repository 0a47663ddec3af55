"""Utterances: what is said, where it is to be heard, and batches of them of like length, which need little padding."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from thinwire_trainer.errors import RunError
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from thinwire_deepspeech.decoding import encoded, unknown
from thinwire_deepspeech.sound import BINS, frames_of


def transcript_of(text: str, place: str) -> str:
    """Transcript in capitals, with single spaces; RunError, naming the place, for an empty one or strange letters."""
    transcript = " ".join(text.upper().split())
    if not transcript:
        raise RunError(f"{place}: the transcript is empty")
    if strange := unknown(transcript):
        shown = ", ".join(f"{character!r} (U+{ord(character):04X})" for character in strange[:5])
        raise RunError(
            f"{place}: the transcript has {shown}, expected letters A to Z, apostrophes and spaces: spell it out"
        )
    return transcript


@dataclass(frozen=True, kw_only=True)
class Utterance:
    """samples: how many at 16 kHz; read: gives them, float32 [samples] in −1 … 1.

    For messages, name: of the file; listed: where its list names it.
    """

    name: str
    transcript: str
    samples: int
    read: Callable[[], Tensor]
    listed: str = ""

    @property
    def frames(self) -> int:
        """Frames of its spectrogram."""
        return frames_of(self.samples)

    def heard(self) -> Tensor:
        """Sound of the utterance; RunError that says where to strike it out, as what only reading shows ends a run."""
        try:
            return self.read()
        except (RunError, OSError) as error:
            raise RunError(
                f"{error}, which only reading shows, so that --skip-bad leaves it in: "
                f"take it off its list ({self.listed})"
            ) from None

    @property
    def labels(self) -> list[int]:
        """Labels of its transcript."""
        return encoded(self.transcript)


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Utterances to train on, and to test with by group, the first of which is the one that figures are of."""

    train: Sequence[Utterance]
    tests: Mapping[str, Sequence[Utterance]]


def frame_counts(utterances: Sequence[Utterance]) -> npt.NDArray[np.int64]:
    """Frames of each utterance."""
    return np.array([utterance.frames for utterance in utterances], np.int64)


class Batch(NamedTuple):
    """All in the host's memory. group: the test utterances' number of it; 0 in training."""

    spectrograms: Tensor  # float32 [n, BINS, frames], 0 behind each end
    lengths: Tensor  # int64 [n], frames
    labels: Tensor  # int64, of all transcripts one after the other
    label_lengths: Tensor  # int64 [n]
    transcripts: tuple[str, ...]
    group: int = 0


def batch_of(utterances: Sequence[Utterance], spectrograms: Sequence[Tensor], group: int = 0) -> Batch:
    """Utterances and their spectrograms [BINS, frames], maybe none."""
    frames_first = [spectrogram.T for spectrogram in spectrograms]
    padded = pad_sequence(frames_first, batch_first=True).transpose(1, 2) if frames_first else torch.empty(0, BINS, 0)
    labels = [utterance.labels for utterance in utterances]
    return Batch(
        spectrograms=padded.contiguous(),
        lengths=torch.tensor([len(frames) for frames in frames_first], dtype=torch.int64),
        labels=torch.tensor([label for each in labels for label in each], dtype=torch.int64),
        label_lengths=torch.tensor([len(each) for each in labels], dtype=torch.int64),
        transcripts=tuple(utterance.transcript for utterance in utterances),
        group=group,
    )


Lengths = npt.NDArray[np.int64]
SPREAD = 0.2  # of a length, by which its place varies from epoch to epoch


def bucketed(lengths: Lengths, *, rank: int, size: int, batch_size: int, random: np.random.Generator) -> list[Tensor]:
    """This rank's batches of indices, in order. random: in the same state on every rank.

    Sorted by length, up to SPREAD, so that a batch is not the same in every epoch; neighbours go to different ranks;
    the batches' order is random, and the same on all ranks. As many batches of as many utterances on every rank; where
    `size` does not divide their number, up to size − 1 utterances are taken twice.
    """
    order = np.argsort(lengths * (1 + SPREAD * random.random(len(lengths))), kind="stable")
    dealt = _dealt(order, rank, size)
    steps = -(-len(dealt) // batch_size)
    shards = torch.from_numpy(dealt).tensor_split(steps)
    return [shards[step] for step in random.permutation(steps)]


def shuffled(lengths: Lengths, *, rank: int, size: int, batch_size: int, random: np.random.Generator) -> list[Tensor]:
    """Batches as by `bucketed`, whatever the lengths: ranks then have unlike work."""
    dealt = _dealt(random.permutation(len(lengths)), rank, size)
    return list(torch.from_numpy(dealt).tensor_split(-(-len(dealt) // batch_size)))


def _dealt(order: Lengths, rank: int, size: int) -> Lengths:
    return order[np.arange(rank, size * -(-len(order) // size), size) % len(order)]


def sorted_batches(lengths: Lengths, *, rank: int, size: int, batch_size: int) -> Sequence[Tensor]:
    """This rank's test batches: over all ranks each utterance once, the like in length together. Maybe one, empty."""
    order = torch.from_numpy(np.argsort(lengths, kind="stable"))
    batches: tuple[Tensor, ...] = torch.split(order[rank::size], batch_size)
    return batches
