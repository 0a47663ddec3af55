"""Data sets in their published formats, and broken ones: each error names the file and the fault."""

import json

import numpy as np
import pytest
import soundfile
import tiny_speech
import torch
from thinwire_deepspeech.data import an4, librispeech, manifest
from thinwire_trainer.data import Faults
from thinwire_trainer.errors import RunError
from tiny_speech import RATE, sound


def read(load, folder, *, skip=False):
    return load(folder, faults=Faults(skip=skip))


def read_with_faults(load, folder):
    """The corpus, and why each utterance was left out that was."""
    faults = Faults(skip=True)
    return load(folder, faults=faults), faults.found


def transcripts(utterances):
    return [utterance.transcript for utterance in utterances]


@pytest.mark.parametrize(("suffix", "order"), [(".raw", ">i2"), (".raw", "<i2"), (".sph", ""), (".wav", "")])
def test_an4(tmp_path, suffix, order):
    root = tiny_speech.an4(tmp_path, suffix=suffix, order=order)
    for folder in (tmp_path, root):
        corpus = read(an4.load, folder)
        assert transcripts(corpus.train) == ["YES", "GO DO"]
        assert {name: transcripts(group) for name, group in corpus.tests.items()} == {"test": ["RUBOUT"]}
        for utterance in [*corpus.train, *corpus.tests["test"]]:
            samples = utterance.read()
            assert samples.dtype == torch.float32
            assert len(samples) == utterance.samples
            np.testing.assert_allclose(samples, sound(utterance.transcript), atol=1e-4)


def test_librispeech(tmp_path):
    root = tiny_speech.librispeech(tmp_path)
    corpus = read(librispeech.load, tmp_path)
    assert transcripts(corpus.train) == ["IT'S A", "BEAD"]
    assert {name: transcripts(group) for name, group in corpus.tests.items()} == {
        "test-clean": ["CAB"],
        "test-other": ["DAB A"],
    }
    np.testing.assert_allclose(corpus.train[1].read(), sound("BEAD"), atol=1e-4)
    for part in ("test-clean", "test-other"):
        (root / part).rename(root / part.replace("test", "dev"))
    assert list(read(librispeech.load, root).tests) == ["dev-clean", "dev-other"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("train.csv", "path,transcript\n0.wav,a\n"),
        ("train.csv", 'wav_filename,wav_filesize,transcript\r\n0.wav,9,"a"\r\n\r\n'),
        ("train.csv", "0.wav,a\n"),
        ("train.csv", "0.wav,0.txt\n"),
        ("train.tsv", "client_id\tpath\tsentence\nx\t0.wav\ta\n"),
        ("train.jsonl", '{"audio_filepath": "0.wav", "duration": 0.2, "text": "a"}\n\n'),
        ("train.jsonl", '{"audio_filepath": "0.wav", "offset": 0, "duration": 0.204, "text": "a"}\n'),
        ("train.csv", " Path,Transcript\n0.wav,a\n"),
        ("train.csv", "path,transcript\r0.wav,a\r"),
        ("train.csv", "\ufeffpath,transcript\n0.wav,a\n"),
    ],
)
def test_manifests(tmp_path, name, content):
    tiny_speech.manifest(tmp_path)
    (tmp_path / "train.csv").unlink()
    (tmp_path / "0.txt").write_text("a\n")
    (tmp_path / name).write_text(content)
    corpus = read(manifest.load, tmp_path)
    assert transcripts(corpus.train) == ["A"]
    assert len(corpus.train[0].read()) == corpus.train[0].samples == 3200


def test_stereo_is_mixed_down(tmp_path):
    tiny_speech.manifest(tmp_path)
    left, right = sound("AB"), sound("CD")
    soundfile.write(tmp_path / "0.wav", np.stack([left, right], 1), RATE)
    np.testing.assert_allclose(read(manifest.load, tmp_path).train[0].read(), (left + right) / 2, atol=1e-4)


def cut(path, nbytes):
    path.write_bytes(path.read_bytes()[:-nbytes])


def rewrite(path, **given):
    soundfile.write(path, sound("AB"), **({"samplerate": RATE} | given))


def text(path, content):
    path.write_bytes(content.encode("latin-1"))


# what is done to a manifest's folder -> what the error says; 0.wav is the first training file
BROKEN = {
    "wrong rate": (lambda d: rewrite(d / "0.wav", samplerate=8000), r"0\.wav is at 8,000 Hz, expected 16,000: convert"),
    "truncated wav": (
        lambda d: cut(d / "0.wav", 100),
        r"0\.wav is truncated: its header promises 6,444 bytes, 6,344",
    ),
    "header only": (lambda d: cut(d / "0.wav", 6400), r"0\.wav is truncated|0\.wav has 0 samples"),
    "half a header": (lambda d: cut(d / "0.wav", 6430), r"0\.wav is no sound file that can be read, or is truncated"),
    "empty file": (lambda d: text(d / "0.wav", ""), r"0\.wav is no sound file"),
    "no sound": (lambda d: soundfile.write(d / "0.wav", np.zeros(0), RATE), r"0\.wav has 0 samples, expected at least"),
    "other file": (lambda d: text(d / "0.wav", "hello" * 99), r"0\.wav is no sound file"),
    "missing": (lambda d: (d / "0.wav").unlink(), r"0\.wav is missing"),
    "a folder": (lambda d: ((d / "0.wav").unlink(), (d / "0.wav").mkdir()), r"0\.wav cannot be read: Is a directory"),
    "too long a name": (
        lambda d: text(d / "train.csv", "0" * 300 + ".wav,a\n1.wav,a\n"),
        r"0\.wav cannot be read: File name too long",
    ),
    "text that is a folder": (
        lambda d: (text(d / "train.csv", "0.wav,0.txt\n1.wav,a\n"), (d / "0.txt").mkdir()),
        r"0\.txt cannot be read: Is a directory",
    ),
    "empty transcript": (lambda d: text(d / "train.csv", "0.wav, \n1.wav,a\n"), r"train\.csv, line 1: .* is empty"),
    "digits": (
        lambda d: text(d / "train.csv", "0.wav,a 7\n1.wav,a\n"),
        r"line 1: the transcript has '7' \(U\+0037\)",
    ),
    "one column": (lambda d: text(d / "train.csv", "path,text\n0.wav\n1.wav,a\n"), r"train\.csv, line 2 has 1 columns"),
    "a comma": (
        lambda d: text(d / "train.csv", "0.wav,a, b\n1.wav,a\n".replace("0.wav", "1.wav,a\n0.wav")),
        r"train\.csv, line 2 has 3 columns, expected 2",
    ),
    "endless field": (
        lambda d: text(d / "train.csv", 'path,text\n0.wav,"' + "a" * 200_000 + "\n1.wav,a\n"),
        r"line 2, is no line of a tab",
    ),
    "missing text": (lambda d: text(d / "train.csv", "0.wav,0.txt\n1.wav,a\n"), r"0\.txt is missing"),
    "text in latin-1": (
        lambda d: (text(d / "0.txt", "\u00fcber"), text(d / "train.csv", "0.wav,0.txt\n1.wav,a\n")),
        r"0\.txt, line 1, is not UTF-8 \(byte 0xfc\)",
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_broken_utterances_are_named_or_left_out(tmp_path, fault):
    tiny_speech.manifest(tmp_path)
    breaking, expected = BROKEN[fault]
    breaking(tmp_path)
    with pytest.raises(RunError, match=expected) as raised:
        read(manifest.load, tmp_path)
    assert str(raised.value).endswith("(--skip-bad leaves such data out, and counts them)")
    corpus, found = read_with_faults(manifest.load, tmp_path)
    assert len(found) == 1
    assert "0.wav" not in {utterance.name.rpartition("/")[2] for utterance in corpus.train}
    assert corpus.train


# of what no utterance can be blamed for
UNREADABLE = {
    "no list": (lambda d: (d / "test.csv").unlink(), r"has 0 of test\.csv or test\.tsv or test\.jsonl, expected one"),
    "two lists": (lambda d: text(d / "test.tsv", ""), r"has 2 of test\.csv"),
    "latin-1": (lambda d: text(d / "train.csv", "path,text\n0.wav,\u00fc\n"), r"train\.csv, line 2, is not UTF-8"),
    "stray mark in the names": (
        lambda d: text(d / "train.csv", '"path,text\n0.wav,a\n'),
        r"line 1, is no line of a tab",
    ),
    "two columns of words": (
        lambda d: text(d / "train.csv", "path,transcript,text\n0.wav,a,b\n"),
        r"train\.csv, line 1 has transcript and text, which mean the same",
    ),
    "other columns": (lambda d: text(d / "train.csv", "file,text\n"), r"train\.csv, line 1: expected columns path or"),
}


@pytest.mark.parametrize("fault", UNREADABLE)
def test_broken_lists_are_never_left_out(tmp_path, fault):
    tiny_speech.manifest(tmp_path)
    breaking, expected = UNREADABLE[fault]
    breaking(tmp_path)
    for skip in (False, True):
        with pytest.raises(RunError, match=expected):
            read(manifest.load, tmp_path, skip=skip)


def test_jsonl_that_is_none(tmp_path):
    tiny_speech.manifest(tmp_path)
    (tmp_path / "train.csv").unlink()
    lines = ["{", "[]", '{"path": 3, "text": "a"}', '{"path": "0.wav"}', json.dumps({"path": "0.wav", "text": "a"})]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    corpus, found = read_with_faults(manifest.load, tmp_path)
    assert (len(corpus.train), len(found)) == (1, 4)
    assert "train.jsonl, line 1: expected an object" in found[0]


@pytest.mark.parametrize("row", range(6))
def test_a_stray_quotation_mark_spoils_its_own_line(tmp_path, row):
    tiny_speech.manifest(tmp_path)
    whole = transcripts(read(manifest.load, tmp_path).train)
    lines = (tmp_path / "train.csv").read_text().splitlines()
    lines[row + 1] = lines[row + 1].replace(",", ',"')
    (tmp_path / "train.csv").write_text("\n".join(lines))
    with pytest.raises(RunError, match=rf"train\.csv, line {row + 2}, is no line of a table"):
        read(manifest.load, tmp_path)
    corpus, found = read_with_faults(manifest.load, tmp_path)
    assert transcripts(corpus.train) == whole[:row] + whole[row + 1 :]
    assert len(found) == 1


def with_lines(folder, *entries):
    """A list of 0.wav, which lasts 0.2 s for each of its letters."""
    tiny_speech.manifest(folder)
    soundfile.write(folder / "0.wav", sound("ABCD", letter=0.2), RATE)
    (folder / "train.csv").unlink()
    lines = [json.dumps({"audio_filepath": "0.wav"} | entry) for entry in entries]
    (folder / "train.jsonl").write_text("\n".join(lines))


def test_parts_of_a_file(tmp_path):
    parts = [(0.2 * number, 0.2) for number in range(4)] + [(0.4, None), (0.4, 0.405)]
    entries = [{"text": "abcd"[number % 4], "offset": o, "duration": d} for number, (o, d) in enumerate(parts)]
    with_lines(tmp_path, *entries)
    whole = sound("ABCD", letter=0.2)
    for (offset, duration), utterance in zip(parts, read(manifest.load, tmp_path).train, strict=True):
        start, samples = round(offset * RATE), 3200 if duration == 0.2 else 6400
        assert utterance.samples == samples
        np.testing.assert_allclose(utterance.read(), whole[start : start + samples], atol=1e-4)


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"text": "a", "duration": 1}, r"line 1: 1 s from 0 s on are no part of .*0\.wav, which lasts 0\.8 s"),
        ({"text": "a", "offset": 0.7, "duration": 0.2}, "0.2 s from 0.7 s on are no part"),
        ({"text": "a", "offset": 0.8}, "0 s from 0.8 s on are no part"),
        ({"text": "a", "offset": 0.1, "duration": 0}, "0 s from 0.1 s on are no part"),
        ({"text": "a", "offset": -1}, "the offset is -1, expected seconds"),
        ({"text": "a", "duration": "1"}, "the duration is '1', expected seconds"),
        ({"text": "a", "duration": float("nan")}, "the duration is nan, expected seconds"),
        ({"text": "a", "sentence": "b"}, "line 1 has sentence and text, which mean the same"),
    ],
)
def test_what_is_no_part_of_a_file(tmp_path, entry, says):
    with_lines(tmp_path, entry, {"text": "abcd"})
    with pytest.raises(RunError, match=says):
        read(manifest.load, tmp_path)
    corpus, found = read_with_faults(manifest.load, tmp_path)
    assert (transcripts(corpus.train), len(found)) == (["ABCD"], 1)


def test_truncated_flac(tmp_path):
    chapter = tiny_speech.librispeech(tmp_path) / "train-clean-100" / "19" / "198"
    cut(chapter / "19-198-0001.flac", 400)
    with pytest.raises(RunError, match=r"19-198-0001\.flac"):
        read(librispeech.load, tmp_path)
    assert transcripts(read(librispeech.load, tmp_path, skip=True).train) == ["IT'S A"]


def test_damaged_flac_is_found_when_it_is_read(tmp_path):
    tiny_speech.damaged_inside(tmp_path)
    with pytest.raises(RunError, match=r"19-198-0001\.flac"):
        [utterance.read() for utterance in read(librispeech.load, tmp_path).train]


def test_raw_samples_that_cannot_be_read_are_found_when_they_are_loaded(tmp_path):
    path = tiny_speech.an4(tmp_path) / "wav" / "an4_clstk" / "fash" / "an251-fash-b.raw"
    path.unlink()
    path.mkdir()
    with pytest.raises(RunError, match=r"an251-fash-b\.raw cannot be read: Is a directory"):
        read(an4.load, tmp_path)
    assert transcripts(read(an4.load, tmp_path, skip=True).train) == ["GO DO"]


@pytest.mark.parametrize(("suffix", "nbytes"), [(".raw", 1), (".sph", 10), (".wav", 10)])
def test_truncated_an4(tmp_path, suffix, nbytes):
    root = tiny_speech.an4(tmp_path, suffix=suffix)
    cut(root / "wav" / "an4_clstk" / "fash" / f"an251-fash-b{suffix}", nbytes)
    with pytest.raises(RunError, match=r"an251-fash-b\.\w+ is truncated"):
        read(an4.load, tmp_path)
    assert transcripts(read(an4.load, tmp_path, skip=True).train) == ["GO DO"]


def test_a_line_of_an4_is_that_of_the_file(tmp_path):
    transcripts = tiny_speech.an4(tmp_path) / "etc" / "an4_train.transcription"
    first, second = transcripts.read_text().splitlines()
    transcripts.write_text(f"\n{first}\n \n{second.replace('(', '(x')}\n")
    with pytest.raises(RunError, match=r"an4_train\.transcription, line 4 is .* expected the words"):
        read(an4.load, tmp_path)


def test_an4_whose_lists_differ(tmp_path):
    root = tiny_speech.an4(tmp_path)
    ids = root / "etc" / "an4_train.fileids"
    names = ids.read_text()
    ids.write_text("".join(reversed(names.splitlines(keepends=True))))
    with pytest.raises(RunError, match=r"transcription, line 1 is .* expected the words and \(an253-fash-b\)"):
        read(an4.load, tmp_path)
    ids.write_text(names + "an4_clstk/fash/an254-fash-b\n")
    with pytest.raises(RunError, match=r"names 3 files, .*an4_train\.transcription has 2 lines"):
        read(an4.load, tmp_path)


@pytest.mark.parametrize("load", [an4.load, librispeech.load])
def test_what_is_not_there_is_named(tmp_path, load):
    with pytest.raises(RunError, match=r"missing: .*unpack"):
        read(load, tmp_path)


def test_not_finite(tmp_path):
    tiny_speech.manifest(tmp_path)
    samples = sound("AB")
    samples[50] = np.nan
    soundfile.write(tmp_path / "0.wav", samples, RATE, subtype="FLOAT")
    with pytest.raises(RunError, match=r"0\.wav has samples that are not finite"):
        read(manifest.load, tmp_path).train[0].read()
