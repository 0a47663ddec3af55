"""SpecAugment (Park et al., Interspeech 2019): stripes of time and frequency are blotted out in training."""

import numpy as np
from torch import Tensor

MASKS = 2  # of either kind
WIDEST = 27  # bins
LONGEST = 100  # frames
SHARE = 0.2  # of an utterance, at most, for a stripe of time


def spec_augment(spectrogram: Tensor, random: np.random.Generator) -> Tensor:
    """A copy of [bins, frames] with MASKS stripes of each kind set to 0, which is the mean.

    The paper's LD policy without time warping, which it found to matter least. Widths are uniform from 0 on.
    """
    bins, frames = spectrogram.shape
    masked = spectrogram.clone()
    for _ in range(MASKS):
        masked[_stripe(bins, WIDEST, random), :] = 0
        masked[:, _stripe(frames, min(LONGEST, int(SHARE * frames)), random)] = 0
    return masked


def _stripe(length: int, widest: int, random: np.random.Generator) -> slice:
    width = int(random.integers(min(widest, length) + 1))
    start = int(random.integers(length - width + 1))
    return slice(start, start + width)
