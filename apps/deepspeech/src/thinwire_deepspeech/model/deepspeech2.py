"""DeepSpeech2 (Amodei et al. 2016) as the published code for gTop-k and Ok-Topk has it, in any size."""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from thinwire_deepspeech.model.lookahead import Lookahead
from thinwire_deepspeech.model.masked_convolution import MaskedConvolution
from thinwire_deepspeech.sound.spectrogram import BINS

CELLS: dict[str, Callable[..., nn.RNNBase]] = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}


@dataclass(frozen=True, kw_only=True)
class Convolution:
    """One layer in front: kernel and stride are (frequency, time)."""

    channels: int
    kernel: tuple[int, int]
    stride: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Size:
    """Of a model. cell: of `CELLS`. context: frames that `Lookahead` adds where layers are not bidirectional."""

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
