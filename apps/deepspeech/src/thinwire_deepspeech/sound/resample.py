"""Sound at another rate."""

from math import gcd

import torch
from torch import Tensor
from torch.nn.functional import pad


def resample(samples: Tensor, old: int, new: int) -> Tensor:
    """float32 [n] at `old` Hz -> [⌈n·new/old⌉] at `new` Hz; frequencies that the lower rate cannot hold are cut off.

    By Fourier transform, of the samples and zeros up to a length that both rates divide evenly.
    """
    down, up = old // gcd(old, new), new // gcd(old, new)
    n, blocks = len(samples), -(-len(samples) // down)
    spectrum = torch.fft.rfft(pad(samples, (0, blocks * down - n)))
    length = blocks * up
    kept = (min(length, blocks * down) + 1) // 2
    shorter: Tensor = torch.fft.irfft(spectrum[:kept], n=length) * (up / down)
    return shorter[: -(-n * up // down)]
