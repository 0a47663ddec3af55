"""Utterances as the model takes them."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from thinwire_deepspeech.data.utterances import Utterance
from thinwire_deepspeech.sound.spectrogram import BINS


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
