"""What the model hears: a spectrogram on a linear scale, as in the published DeepSpeech2 for PyTorch."""

import torch
from torch import Tensor

RATE = 16_000  # samples a second
WINDOW = 320  # samples, 20 ms
HOP = 160  # samples, 10 ms
BINS = WINDOW // 2 + 1  # 161 frequencies, 50 Hz apart
SHORTEST = WINDOW // 2 + 1  # samples: the ends are mirrored by half a window


def frames_of(samples: int) -> int:
    """How many frames so many samples make."""
    return samples // HOP + 1


def spectrogram(samples: Tensor) -> Tensor:
    """log(1 + |STFT|) of one utterance, with mean 0 and deviation 1; float32 [BINS, frames].

    samples: float32 [n] in −1 … 1 at 16 kHz, n ≥ SHORTEST. Windows are Hamming's, symmetric; frame t is about sample
    160·t, the ends are mirrored. Silence gives zeros.
    """
    window = torch.hamming_window(WINDOW, periodic=False)
    spectrum = torch.stft(samples, WINDOW, HOP, window=window, pad_mode="reflect", return_complex=True)
    loudness = spectrum.abs().log1p()
    loudness = loudness - loudness.mean()
    return loudness / loudness.std().clamp(min=1e-5)
