"""Synthetic speech by espeak-ng's library, out of the wheel `espeakng-loader`; run as a process of its own.

    python -m thinwire_deepspeech.data.espeak FILE < requests.json

What the library says depends on all that it said before. A fresh process that is asked for the same utterances in the
same order says the same, bit by bit.
"""

import ctypes
import json
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Samples = npt.NDArray[np.int16]

SYNCHRONOUS, DONT_EXIT = 2, 0x8000  # AUDIO_OUTPUT_SYNCHRONOUS, espeakINITIALIZE_DONT_EXIT of speak_lib.h
UTF8, CHARACTERS = 1, 1
SPEED, PITCH = 1, 3  # words a minute (80 … 450); 0 … 99
HEARD = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)


class Request(NamedTuple):
    """One utterance. voice: language, with a variant after "+"; speed: words a minute; pitch: 0 … 99."""

    text: str
    voice: str
    speed: int
    pitch: int


class Espeak:
    """The library, once a process; it has one state."""

    def __init__(self) -> None:
        """ImportError without the wheel; OSError where its library does not load."""
        import espeakng_loader

        self._library = ctypes.CDLL(espeakng_loader.get_library_path())
        data = espeakng_loader.get_data_path().encode()
        self.rate: int = self._library.espeak_Initialize(SYNCHRONOUS, 0, data, DONT_EXIT)  # samples a second
        if self.rate <= 0:
            raise OSError(f"espeak-ng does not start with the data in {data.decode()}")
        self._library.espeak_ng_SetRandSeed(ctypes.c_long(1))  # else it is the time
        self._heard: list[Samples] = []
        self._callback: Callable[..., int] = HEARD(self._hear)  # kept, as the library calls it
        self._library.espeak_SetSynthCallback(self._callback)

    def say(self, request: Request) -> Samples:
        """int16 [n] at `rate`; ValueError for a voice that it does not have."""
        if self._library.espeak_SetVoiceByName(request.voice.encode()):
            raise ValueError(f"espeak-ng has no voice {request.voice!r}")
        self._library.espeak_SetParameter(SPEED, request.speed, 0)
        self._library.espeak_SetParameter(PITCH, request.pitch, 0)
        text = request.text.lower().encode()  # capitals could be taken for initials
        self._library.espeak_Synth(text, ctypes.c_size_t(len(text) + 1), 0, CHARACTERS, 0, UTF8, None, None)
        self._library.espeak_Synchronize()
        said = np.concatenate(self._heard) if self._heard else np.empty(0, np.int16)
        self._heard.clear()
        return said

    def _hear(self, samples: Any, count: int, events: Any) -> int:
        del events
        if samples and count > 0:
            self._heard.append(np.ctypeslib.as_array(samples, (count,)).copy())
        return 0


def main(file: str) -> None:
    """Reads requests, writes their samples, one after the other, with their lengths and the rate, as .npz."""
    requests = [Request(*fields) for fields in json.load(sys.stdin)]
    espeak = Espeak()
    said = [espeak.say(request) for request in requests]
    lengths = np.array([len(samples) for samples in said])
    np.savez(file, samples=np.concatenate(said), lengths=lengths, rate=espeak.rate)


if __name__ == "__main__":
    main(sys.argv[1])
