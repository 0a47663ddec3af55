"""DeepSpeech2 (Amodei et al. 2016) as the published code for gTop-k and Ok-Topk has it, in any size."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import conv1d, pad
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from thinwire_deepspeech.sound import BINS


class MaskedConvolution(nn.Module):
    """Conv2d, batch normalisation, Hardtanh(0, 20); the time behind an utterance's end stays 0 and is not counted."""

    def __init__(self, inputs: int, outputs: int, *, kernel: tuple[int, int], stride: tuple[int, int]) -> None:
        """kernel, stride: (frequency, time); kernels are odd, so that frames stay where they are."""
        super().__init__()
        padding = (kernel[0] // 2, kernel[1] // 2)
        self.convolution = nn.Conv2d(inputs, outputs, kernel, stride, padding)
        self.norm = nn.BatchNorm1d(outputs)
        self.stride = stride

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """x [n, inputs, bins, frames], 0 behind each of the lengths [n] -> [n, outputs, bins', frames'], lengths'."""
        x, lengths = self.convolution(x), self.shortened(lengths)
        n, channels, bins, frames = x.shape
        inside = torch.arange(frames) < lengths[:, None]  # [n, frames], on the host, where the lengths are
        inside = inside.to(x.device)
        by_frame = x.permute(0, 3, 2, 1)  # [n, frames, bins, channels]
        heard = self.norm(by_frame[inside].flatten(0, 1)).clamp(0, 20)
        whole = x.new_zeros(n, frames, bins, channels, dtype=heard.dtype)
        whole[inside] = heard.unflatten(0, (-1, bins))
        return whole.permute(0, 3, 2, 1), lengths

    def shortened(self, lengths: Tensor) -> Tensor:
        """Frames out of so many frames in."""
        return (lengths - 1) // self.stride[1] + 1

    def bins(self, bins: int) -> int:
        """Bins out of so many bins in."""
        return (bins - 1) // self.stride[0] + 1


class Lookahead(nn.Module):
    """Each feature's weighted sum of this frame and the `context` after it (Wang et al. 2016), then Hardtanh(0, 20)."""

    def __init__(self, features: int, context: int) -> None:
        super().__init__()
        bound = (context + 1) ** -0.5
        self.weight = nn.Parameter(torch.empty(features, context + 1).uniform_(-bound, bound))

    def forward(self, x: Tensor) -> Tensor:
        """x [n, frames, features], 0 behind each utterance's end -> the same shape."""
        ahead = pad(x.transpose(1, 2), (0, self.weight.shape[1] - 1))
        return conv1d(ahead, self.weight[:, None], groups=len(self.weight)).transpose(1, 2).clamp(0, 20)


CELLS: dict[str, Callable[..., nn.RNNBase]] = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}


@dataclass(frozen=True, kw_only=True)
class Convolution:
    """One layer in front: kernel and stride are (frequency, time)."""

    channels: int
    kernel: tuple[int, int]
    stride: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Size:
    """Size of a model. cell: of `CELLS`. context: frames that `Lookahead` adds where layers are not bidirectional."""

    convolutions: tuple[Convolution, ...]
    cell: str
    hidden: int
    layers: int
    bidirectional: bool = True
    context: int = 20

    @property
    def stride(self) -> int:
        """Frames of the spectrogram for one of the output."""
        return prod(convolution.stride[1] for convolution in self.convolutions)


class DeepSpeech2(nn.Module):
    """Spectrograms to the log-probability of every label in every frame, 0 being CTC's blank.

    Directions are added, not joined; every recurrent layer but the first, and the last linear one, normalise what they
    are given over frames.
    """

    def __init__(self, size: Size, *, labels: int, bins: int = BINS) -> None:
        super().__init__()
        self.size = size
        self.convolutions = nn.ModuleList()
        channels = 1
        for each in size.convolutions:
            layer = MaskedConvolution(channels, each.channels, kernel=each.kernel, stride=each.stride)
            self.convolutions.append(layer)
            channels, bins = each.channels, layer.bins(bins)
        widths = [channels * bins, *[size.hidden] * (size.layers - 1)]
        self.recurrent = nn.ModuleList(Recurrent(width, size, norm=number > 0) for number, width in enumerate(widths))
        self.lookahead = None if size.bidirectional else Lookahead(size.hidden, size.context)
        self.norm = nn.BatchNorm1d(size.hidden)
        self.out = nn.Linear(size.hidden, labels, bias=False)

    def forward(self, spectrograms: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """spectrograms [n, bins, frames], 0 behind each of the lengths (int64 [n], on the host).

        Returns log-probabilities [frames', n, labels] and the lengths that count of them, on the host.
        """
        x = spectrograms[:, None]
        for layer in self.convolutions:
            x, lengths = layer(x, lengths)
        packed = pack_padded_sequence(x.flatten(1, 2).permute(2, 0, 1), lengths, enforce_sorted=False)
        for layer in self.recurrent:
            packed = layer(packed)
        if self.lookahead is not None:
            whole, _ = pad_packed_sequence(packed, batch_first=True)
            packed = pack_padded_sequence(self.lookahead(whole), lengths, batch_first=True, enforce_sorted=False)
        scores, _ = pad_packed_sequence(replaced(packed, self.out(self.norm(packed.data))))
        return scores.float().log_softmax(-1), lengths

    def output_lengths(self, frames: Tensor) -> Tensor:
        """Frames of the output for so many of the spectrogram (int64)."""
        for layer in self.convolutions:
            assert isinstance(layer, MaskedConvolution)
            frames = layer.shortened(frames)
        return frames


class Recurrent(nn.Module):
    """Batch normalisation over frames, then one layer of cells; packed, so that there is no padding to leave out."""

    def __init__(self, inputs: int, size: Size, *, norm: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(inputs) if norm else None
        self.cells: nn.RNNBase = CELLS[size.cell](inputs, size.hidden, bidirectional=size.bidirectional)

    def forward(self, packed: PackedSequence) -> PackedSequence:
        """data [frames of all, inputs] -> [frames of all, hidden]."""
        if self.norm is not None:
            packed = replaced(packed, self.norm(packed.data))
        packed, _ = self.cells(packed)
        if not self.cells.bidirectional:
            return packed
        return replaced(packed, packed.data.view(len(packed.data), 2, -1).sum(1))


def replaced(packed: PackedSequence, data: Tensor) -> PackedSequence:
    """The same utterances with other features."""
    return PackedSequence(data, packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices)


PUBLISHED = (
    Convolution(channels=32, kernel=(41, 11), stride=(2, 2)),
    Convolution(channels=32, kernel=(21, 11), stride=(2, 1)),
)
SMALL = (
    Convolution(channels=8, kernel=(11, 9), stride=(4, 2)),
    Convolution(channels=16, kernel=(7, 5), stride=(3, 2)),
)


def lstman4(**given: Any) -> Size:
    """Model of gTop-k, Ok-Topk and SparDL on AN4: five layers of 800 that hear forwards, with 20 frames ahead."""
    return replace(
        Size(convolutions=PUBLISHED, cell="lstm", hidden=800, layers=5, bidirectional=False, context=20), **given
    )


def deepspeech2(**given: Any) -> Size:
    """The same, both ways: the default of the code that those go back to."""
    return lstman4(**({"bidirectional": True} | given))


def small(**given: Any) -> Size:
    """Model for a few hundred words and a CPU: one output frame for 40 ms."""
    return replace(Size(convolutions=SMALL, cell="gru", hidden=96, layers=2), **given)
