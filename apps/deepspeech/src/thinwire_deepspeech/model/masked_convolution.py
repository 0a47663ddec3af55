"""Convolution and batch normalisation over utterances of unlike lengths, as if each were alone."""

import torch
from torch import Tensor, nn


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
