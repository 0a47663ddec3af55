"""What the model hears, against SciPy; augmentation; other rates."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from thinwire_deepspeech.sound import (
    BINS,
    HOP,
    LONGEST,
    MASKS,
    RATE,
    SHARE,
    SHORTEST,
    WIDEST,
    WINDOW,
    frames_of,
    resample,
    spec_augment,
    spectrogram,
)


@given(st.integers(SHORTEST, 3000), st.integers(0, 100))
def test_spectrogram_is_scipys(samples, seed):
    from scipy import signal  # a second, of whoever collects tests

    sound = np.random.default_rng(seed).uniform(-1, 1, samples).astype(np.float32)
    window = signal.windows.hamming(WINDOW)
    mirrored = np.pad(sound, WINDOW // 2, mode="reflect")
    _, _, spectrum = signal.stft(
        mirrored, RATE, window, WINDOW, WINDOW - HOP, boundary=None, padded=False, scaling="spectrum"
    )
    expected = np.log1p(np.abs(spectrum) * window.sum())
    expected = (expected - expected.mean()) / expected.std(ddof=1)
    found = spectrogram(torch.from_numpy(sound))
    assert found.shape == (BINS, frames_of(samples)) == expected.shape
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_a_tone_is_in_its_bin():
    tone = torch.sin(2 * np.pi * 1000 * torch.arange(RATE) / RATE)
    assert (spectrogram(tone).argmax(0)[2:-2] == 1000 // 50).all()


def test_silence_is_no_division_by_zero():
    assert (spectrogram(torch.zeros(1000)) == 0).all()


def test_loudness_does_not_matter_much():
    """It enters under the logarithm's 1 + only."""
    sound = torch.rand(4000, generator=torch.Generator().manual_seed(0)) - 0.5
    assert (spectrogram(sound) - spectrogram(sound / 2)).abs().mean() < 0.2


@given(st.integers(1, 400), st.integers(0, 1000))
def test_spec_augment_blots_out_stripes_and_nothing_else(frames, seed):
    plain = torch.ones(BINS, frames)
    masked = spec_augment(plain, np.random.default_rng(seed))
    rows, columns = (masked == 0).all(1), (masked == 0).all(0)
    assert ((masked == 0) == (rows[:, None] | columns)).all()
    assert (plain == 1).all()
    if not columns.all():
        assert rows.sum() <= MASKS * WIDEST
    if not rows.all():
        assert columns.sum() <= MASKS * min(LONGEST, SHARE * frames)
    again = spec_augment(plain, np.random.default_rng(seed))
    assert (masked == again).all()


def test_spec_augment_does_blot_out():
    masked = [spec_augment(torch.ones(BINS, 200), np.random.default_rng(seed)) for seed in range(5)]
    assert all((each == 0).any() for each in masked)


@pytest.mark.parametrize(("old", "samples"), [(22_050, 4_410), (8_000, 800), (16_000, 777)])
def test_resampled_is_scipys(old, samples):
    from scipy import signal

    spectrum = np.fft.rfft(np.random.default_rng(0).uniform(-1, 1, samples))
    spectrum[int(0.3 * samples) :] = 0  # SciPy keeps what is at the highest frequency that both rates have
    sound = np.fft.irfft(spectrum, samples).astype(np.float32)
    found = resample(torch.from_numpy(sound), old, RATE)
    np.testing.assert_allclose(found, signal.resample(sound, samples * RATE // old), atol=1e-5)


def test_resampled_lasts_as_long():
    assert [len(resample(torch.zeros(n), 22_050, RATE)) for n in (1, 441, 442, 5001)] == [1, 320, 321, 3629]
