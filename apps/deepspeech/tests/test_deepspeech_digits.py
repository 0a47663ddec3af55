"""Synthetic digits: made once, the same each time, with nothing of the tests in training."""

from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version

import numpy as np
import pytest
from thinwire_deepspeech.data import spoken_digits
from thinwire_deepspeech.data.espeak import Request
from thinwire_deepspeech.data.spoken_digits import NEW_VOICES, SPEEDS_AND_PITCHES, TRAIN, plan, said
from thinwire_trainer.data import Faults
from thinwire_trainer.errors import RunError

pytest.importorskip("espeakng_loader", reason="espeak-ng's library (pip install espeakng-loader) is not installed")


def few(**given):
    return plan(train=5, tests=2, **given)


def same(one, other):
    return all(np.array_equal(a, b) for part in one for a, b in zip(one[part], other[part], strict=True))


def test_tests_are_held_out():
    parts = plan()
    voices, speeds, pitches = ({getattr(each, f) for each in parts[TRAIN]} for f in ("voice", "speed", "pitch"))
    for each in parts[SPEEDS_AND_PITCHES]:
        assert (each.voice in voices, each.speed in speeds, each.pitch in pitches) == (True, False, False)
    assert not {each.voice for each in parts[NEW_VOICES]} & voices


def test_what_is_said_is_a_function_of_the_plan(tmp_path):
    first, again = (said(tmp_path / name, few()) for name in ("first", "again"))
    assert same(first, again)
    assert not same(first, said(tmp_path / "first", few(seed=1)))
    assert len(list((tmp_path / "first").glob("*.npz"))) == 2


def test_one_makes_it_for_all(tmp_path, monkeypatch):
    made, make = [], spoken_digits._made
    monkeypatch.setattr(spoken_digits, "_made", lambda *given: made.append(1) or make(*given))
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: said(tmp_path, few()), range(4)))
    assert made == [1]
    assert all(same(results[0], each) for each in results)


@pytest.mark.few(2)
@pytest.mark.parametrize("damage", [b"", b"PK", None])
def test_a_damaged_file_is_made_anew(tmp_path, damage):
    first = said(tmp_path, few())
    (path,) = tmp_path.glob("*.npz")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content if damage is None else damage)
    assert same(first, said(tmp_path, few()))


def test_it_says_what_was_asked_for(tmp_path):
    asked = [
        Request(text, voice, speed, 50)
        for text, voice, speed in [("ONE", "en-us", 150), ("ONE ONE ONE", "en-us", 150), ("ONE ONE ONE", "en-us", 250)]
    ]
    short, long, fast = said(tmp_path, {"test": asked})["test"]
    assert len(short) < len(fast) < len(long)
    assert 0.2 * 16_000 < len(short) < 16_000
    assert abs(short).max() > 3000


def test_the_data_set(tmp_path, monkeypatch):
    monkeypatch.setattr(spoken_digits, "plan", few)
    corpus = spoken_digits.load(tmp_path, faults=Faults(skip=False))
    assert (len(corpus.train), list(corpus.tests)) == (5, [SPEEDS_AND_PITCHES, NEW_VOICES])
    assert all(each.name.startswith("synthetic") for each in corpus.train)
    assert len(corpus.train[0].read()) == corpus.train[0].samples
    assert abs(corpus.train[0].read()).max() <= 1


def absent(name):
    raise PackageNotFoundError(name)


def test_what_was_made_is_used_without_the_library(tmp_path, monkeypatch):
    first = said(tmp_path, few())
    monkeypatch.setattr(spoken_digits, "version", absent)
    assert same(first, said(tmp_path, few()))
    with pytest.raises(RunError, match="pip install espeakng-loader"):
        said(tmp_path, few(seed=1))
    (made,) = tmp_path.glob("*.npz")
    made.with_name(made.name.replace(version("espeakng-loader"), "0")).write_bytes(made.read_bytes())
    with pytest.raises(RunError, match=r"of 2 releases of espeak-ng \(.*npz, .*npz\): .* leave one"):
        said(tmp_path, few())


def test_unknown_voices_and_no_library_are_told(tmp_path, monkeypatch):
    with pytest.raises(RunError, match="espeak-ng has no voice 'nobody'"):
        said(tmp_path, {"test": [Request("ONE", "nobody", 150, 50)]})
    assert not list(tmp_path.glob("*.npz"))
    monkeypatch.setattr(spoken_digits, "version", absent)
    with pytest.raises(RunError, match="pip install espeakng-loader"):
        said(tmp_path, few())
