"""Spoken digits, synthetic: one to four digits an utterance, said by espeak-ng in several voices, speeds and pitches.

No human voice is in it: what is learned here says little of people's speech. It is made when it is first used, in
seconds, and kept in DIR/spoken-digits; the same release of espeak-ng makes the same everywhere.
"""

import hashlib
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from random import Random
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt
import torch
from thinwire_trainer.data import Faults, one_at_a_time
from thinwire_trainer.errors import RunError
from thinwire_trainer.records.durable import replacing
from torch import Tensor

from thinwire_deepspeech.data.espeak import Request
from thinwire_deepspeech.data.utterances import Corpus, Utterance
from thinwire_deepspeech.sound import RATE, resample

DIGITS = ("ZERO", "ONE", "TWO", "THREE", "FOUR", "FIVE", "SIX", "SEVEN", "EIGHT", "NINE")
VOICES = (
    *("en-us", "en-us+m3", "en-us+f2", "en", "en+m1", "en+f1"),
    *("en-gb-x-rp", "en-gb-x-rp+f3", "en-gb-scotland+m2", "en-029+f4"),
)
OTHER_VOICES = ("en-us+m7", "en+f5", "en-gb-x-gbcwmd", "en-gb-scotland+f2", "en-us-nyc+m4")
SPEEDS, OTHER_SPEEDS = (120, 140, 160, 180), (130, 150, 170)
PITCHES, OTHER_PITCHES = (30, 45, 60, 75), (37, 52, 67)
TRAIN, SPEEDS_AND_PITCHES, NEW_VOICES = "train", "speeds and pitches", "voices"

Samples = npt.NDArray[np.int16]


def load(data_dir: Path, *, faults: Faults) -> Corpus:
    """The data set, made where `data_dir` does not have it; tests are of other speeds and pitches, and of other voices.

    RunError where it is to be made and there is no wheel of espeak-ng.
    """
    del faults  # there are none
    requests = plan()
    parts = said(data_dir / "spoken-digits", requests)
    train, *tests = (
        [_utterance(request, part) for request, part in zip(requests[name], parts[name], strict=True)]
        for name in requests
    )
    return Corpus(train=train, tests=dict(zip(list(requests)[1:], tests, strict=True)))


def plan(*, train: int = 600, tests: int = 150, seed: int = 0) -> dict[str, list[Request]]:
    """Requests by part."""
    random = Random(seed)
    return {
        TRAIN: _requests(train, VOICES, SPEEDS, PITCHES, random),
        SPEEDS_AND_PITCHES: _requests(tests, VOICES, OTHER_SPEEDS, OTHER_PITCHES, random),
        NEW_VOICES: _requests(tests, OTHER_VOICES, SPEEDS + OTHER_SPEEDS, PITCHES + OTHER_PITCHES, random),
    }


def _requests(
    count: int, voices: Sequence[str], speeds: Sequence[int], pitches: Sequence[int], random: Random
) -> list[Request]:
    def text() -> str:
        return " ".join(random.choices(DIGITS, k=random.randint(1, 4)))

    return [Request(text(), random.choice(voices), random.choice(speeds), random.choice(pitches)) for _ in range(count)]


def _utterance(request: Request, samples: Samples) -> Utterance:
    name = f"synthetic {request.text!r} by {request.voice}, {request.speed} words a minute, pitch {request.pitch}"
    return Utterance(
        name=name, transcript=request.text, samples=len(samples), read=partial(_as_floats, torch.from_numpy(samples))
    )


def _as_floats(samples: Tensor) -> Tensor:
    return samples.float() / 32768


def said(folder: Path, requests: Mapping[str, Sequence[Request]]) -> dict[str, list[Samples]]:
    """Samples, int16 at 16 kHz, by part; from the folder where it is there, which of all processes one fills."""
    asked = json.dumps([request for part in requests.values() for request in part])
    path = _place(folder, hashlib.sha256(asked.encode()).hexdigest()[:16])
    found = _kept(path)
    if found is None:
        with one_at_a_time(folder):
            found = _kept(path)
            if found is None:
                found = _made(asked, folder)
                _keep(path, found)
    each = iter(found)
    return {name: [next(each) for _ in part] for name, part in requests.items()}


def _place(folder: Path, asked: str) -> Path:
    """File of what the wheel says; without the wheel, of what one has said before. RunError where that is nothing,
    or of several releases."""
    try:
        return folder / f"{asked}-{version('espeakng-loader')}.npz"
    except PackageNotFoundError:
        kept = sorted(folder.glob(f"{asked}-*.npz"))
    if len(kept) > 1:
        names = ", ".join(path.name for path in kept)
        raise RunError(f"{folder} has digits of {len(kept)} releases of espeak-ng ({names}): without it, leave one")
    if not kept or _kept(kept[0]) is None:
        raise RunError(
            "--dataset spoken-digits is made with espeak-ng: pip install espeakng-loader, which "
            "thinwire-deepspeech[synthetic] brings"
        )
    return kept[0]


def _made(asked: str, folder: Path) -> list[Samples]:
    """Samples made in a process of its own (see `thinwire_deepspeech.data.espeak`)."""
    path = folder / "said.npz"
    command = [sys.executable, "-m", "thinwire_deepspeech.data.espeak", str(path)]
    done = subprocess.run(command, input=asked, text=True, capture_output=True, check=False)
    if done.returncode:
        raise RunError(f"espeak-ng failed ({(done.stderr.strip().splitlines() or ['without a word'])[-1]:.300})")
    try:
        with np.load(path) as made:
            samples, lengths, rate = torch.from_numpy(made["samples"]), made["lengths"].tolist(), int(made["rate"])
    finally:
        path.unlink()
    resampled = [resample(part.float(), rate, RATE) for part in torch.split(samples, lengths)]
    return [part.round().clamp(-32768, 32767).to(torch.int16).numpy() for part in resampled]


def _keep(path: Path, parts: Sequence[Samples]) -> None:
    with replacing(path) as file:
        np.savez(file, samples=np.concatenate(parts), lengths=np.array([len(part) for part in parts]))


def _kept(path: Path) -> list[Samples] | None:
    """None where there is none, or it is damaged: it is then made anew."""
    try:
        with np.load(path) as kept:
            return list(np.split(kept["samples"], kept["lengths"].cumsum()[:-1]))
    except (OSError, ValueError, KeyError, EOFError, BadZipFile):
        return None
