"""Sound files as spectrograms on a linear scale, as in the published DeepSpeech2 for PyTorch.

Files are at 16 kHz, read by libsndfile, or AN4's raw samples. A file's faults are found without reading all of it:
libsndfile takes a wav file that was cut short for a shorter one, without a word; so what its header promises is
compared with what is there.
"""

import re
import struct
from math import gcd
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import soundfile
import torch
from thinwire_trainer.errors import RunError
from torch import Tensor
from torch.nn.functional import pad

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


OPEN_END = (0xFFFFFFFF, 0)  # of a wav file's size, where a pipe was written to


def samples_in(path: Path) -> int:
    """How many samples at 16 kHz a sound file has; RunError for one that is damaged or not at this rate."""
    _require_readable(path)
    try:
        with soundfile.SoundFile(path) as file:
            if file.samplerate != RATE:
                raise RunError(f"{path} is at {file.samplerate:,} Hz, expected {RATE:,}: convert it")
            frames = int(file.frames)
            if frames:
                file.seek(frames - 1)
                if len(file.read(1)) != 1:
                    raise RunError(_truncated(path, f"its header promises {frames:,} samples"))
    except soundfile.LibsndfileError as error:
        raise RunError(f"{path} is no sound file that can be read, or is truncated ({_reason(error)})") from None
    _require_whole(path)
    return _long_enough(path, frames)


def read_sound(path: Path, *, start: int = 0, samples: int | None = None) -> Tensor:
    """float32 [samples] in −1 … 1, the mean of its channels; RunError as `samples_in`, or where some are not finite.

    start, samples: of a part of it; None: to its end.
    """
    rest = samples_in(path) - start
    expected = rest if samples is None else samples
    try:
        found, _ = soundfile.read(path, expected, start, dtype="float32", always_2d=True)
    except soundfile.LibsndfileError as error:
        raise RunError(f"{path} is damaged ({_reason(error)})") from None
    if len(found) != expected:
        raise RunError(_truncated(path, f"its header promises {expected:,} samples, {len(found):,} are there"))
    mono = torch.from_numpy(found).mean(1)
    if not mono.isfinite().all():
        raise RunError(f"{path} has samples that are not finite")
    return mono


def samples_in_raw(path: Path) -> int:
    """How many 16-bit samples a file without a header has."""
    _require_readable(path)
    nbytes = path.stat().st_size
    if nbytes % 2:
        raise RunError(_truncated(path, f"{nbytes:,} bytes are no whole number of 16-bit samples"))
    return _long_enough(path, nbytes // 2)


def read_raw(path: Path) -> Tensor:
    """Read as `read_sound` does, for 16-bit samples at 16 kHz without a header.

    AN4 is published in either byte order. The right one is where neighbours are nearer: in the other they are noise.
    """
    samples_in_raw(path)
    content = path.read_bytes()
    big, little = (np.frombuffer(content, order).astype(np.float32) / np.float32(32768) for order in (">i2", "<i2"))
    return torch.from_numpy(big if _roughness(big) <= _roughness(little) else little)


def _roughness(samples: npt.NDArray[Any]) -> float:
    """Mean step from one sample to the next."""
    return float(np.abs(np.diff(samples)).mean())


def _long_enough(path: Path, samples: int) -> int:
    if samples < SHORTEST:
        raise RunError(f"{path} has {samples} samples, expected at least {SHORTEST}: it is empty, or was cut")
    return samples


def _require_readable(path: Path) -> None:
    """RunError where it is missing, a folder, or not to be read by this user, which libsndfile does not tell apart."""
    try:
        path.open("rb").close()
    except FileNotFoundError:
        raise RunError(f"{path} is missing") from None
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from None


def _require_whole(path: Path) -> None:
    """The formats whose headers libsndfile does not hold to."""
    with path.open("rb") as file:
        head = file.read(1024)
    there = path.stat().st_size
    promised = _wav_end(path) if head[:4] == b"RIFF" else _sphere_end(head) if head[:7] == b"NIST_1A" else 0
    if promised > there:
        raise RunError(_truncated(path, f"its header promises {promised:,} bytes, {there:,} are there"))


def _wav_end(path: Path) -> int:
    """End of the data chunk; 0 where its header does not say."""
    with path.open("rb") as file:
        file.seek(12)
        while len(header := file.read(8)) == 8:
            kind, size = struct.unpack("<4sI", header)
            if kind == b"data":
                return 0 if size in OPEN_END else file.tell() + size
            file.seek(size + size % 2, 1)
    return 0


def _sphere_end(head: bytes) -> int:
    """End of the samples of a NIST SPHERE file; 0 where its header does not say."""
    text = head.decode("ascii", "replace")
    fields = dict(re.findall(r"^(\w+) -i (\d+)\s*$", text, re.MULTILINE))
    try:
        each = int(fields["sample_n_bytes"]) * int(fields.get("channel_count", 1))
        return int(text.splitlines()[1]) + int(fields["sample_count"]) * each
    except (KeyError, ValueError, IndexError):
        return 0


def _truncated(path: Path, why: str) -> str:
    return f"{path} is truncated: {why}"


def _reason(error: Exception) -> str:
    return str(error).rpartition(": ")[2].rstrip(".") or type(error).__name__
