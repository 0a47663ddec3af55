"""The likeliest label of each frame, with repeats and blanks taken out."""

import numpy as np
import numpy.typing as npt

from thinwire_deepspeech.decoding.alphabet import BLANK

LogProbabilities = npt.NDArray[np.float64]
"""[frames, labels], natural logarithms; every frame's probabilities add up to 1."""


def greedy(log_probabilities: LogProbabilities) -> list[int]:
    """The labels of the likeliest path; of equal ones the lowest label."""
    return collapsed(log_probabilities.argmax(1).tolist())


def collapsed(path: list[int]) -> list[int]:
    """What a path of one label a frame says (B of Graves et al. 2006): runs once, then no blanks."""
    starts = [label for frame, label in enumerate(path) if frame == 0 or path[frame - 1] != label]
    return [label for label in starts if label != BLANK]
