"""A data set of utterances: what is said, and where it is to be heard."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from thinwire_trainer.errors import RunError
from torch import Tensor

from thinwire_deepspeech.decoding.alphabet import encoded
from thinwire_deepspeech.sound.spectrogram import frames_of


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
        """Of its spectrogram."""
        return frames_of(self.samples)

    def heard(self) -> Tensor:
        """What `read` gives; RunError that says where to strike it out, as what only reading shows ends a run."""
        try:
            return self.read()
        except (RunError, OSError) as error:
            raise RunError(
                f"{error}, which only reading shows, so that --skip-bad leaves it in: "
                f"take it off its list ({self.listed})"
            ) from None

    @property
    def labels(self) -> list[int]:
        """Of its transcript."""
        return encoded(self.transcript)


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Utterances to train on, and to test with by group, the first of which is the one that figures are of."""

    train: Sequence[Utterance]
    tests: Mapping[str, Sequence[Utterance]]


def frame_counts(utterances: Sequence[Utterance]) -> npt.NDArray[np.int64]:
    """Of each."""
    return np.array([utterance.frames for utterance in utterances], np.int64)
