"""The models by name: a function of what the flags say."""

from dataclasses import replace
from typing import Any

from thinwire_deepspeech.model.deepspeech2 import Convolution, Size

PUBLISHED = (
    Convolution(channels=32, kernel=(41, 11), stride=(2, 2)),
    Convolution(channels=32, kernel=(21, 11), stride=(2, 1)),
)
SMALL = (
    Convolution(channels=8, kernel=(11, 9), stride=(4, 2)),
    Convolution(channels=16, kernel=(7, 5), stride=(3, 2)),
)


def lstman4(**given: Any) -> Size:
    """Of gTop-k, Ok-Topk and SparDL on AN4: five layers of 800 that hear forwards, with 20 frames ahead."""
    return replace(
        Size(convolutions=PUBLISHED, cell="lstm", hidden=800, layers=5, bidirectional=False, context=20), **given
    )


def deepspeech2(**given: Any) -> Size:
    """The same, both ways: the default of the code that those go back to."""
    return lstman4(**({"bidirectional": True} | given))


def small(**given: Any) -> Size:
    """For a few hundred words and a CPU: one output frame for 40 ms."""
    return replace(Size(convolutions=SMALL, cell="gru", hidden=96, layers=2), **given)
