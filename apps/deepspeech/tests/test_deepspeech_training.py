"""The app under the trainer: resume, every algorithm, wrong flags, own launch, torchrun, transcribe."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile
import tiny_speech
import torch
from resumed_runs import assert_same_bits, killed_after, result, train
from thinwire_deepspeech.__main__ import APP
from thinwire_deepspeech.recognition import heard_in, size_of
from thinwire_deepspeech.transcribe import transcribed
from thinwire_trainer.app import Batches, Keeps, Reads
from thinwire_trainer.command import main
from thinwire_trainer.command_line.flags import entries_of, parse
from thinwire_trainer.errors import RunError
from thinwire_trainer.launching.placement import LAUNCHERS
from thinwire_trainer.records.metrics import read_metrics
from thinwire_trainer.trained import trained
from thinwire_trainer.training.batches import SHUFFLE, derived_seed

TINY = "--dataset manifest --rnn rnn --hidden 4 --layers 1 --batch-size 2"


@pytest.fixture(autouse=True)
def started_by_hand(monkeypatch, tmp_path):
    for variables in LAUNCHERS.values():
        for variable in variables:
            monkeypatch.delenv(variable, raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tiny_speech.manifest(tmp_path_factory.mktemp("data"))


@pytest.fixture
def options(data, tmp_path):
    """From flags as text; the run is in the folder of this name."""

    def make(flags="", *, run="run"):
        argv = [*TINY.split(), "--max-epochs", "2", *flags.split(), f"--data-dir={data}", f"--output={tmp_path / run}"]
        return parse(argv, APP, world_size=None)

    return make


def test_the_task_has_what_it_says(options):
    task = APP.build(options(), torch.device("cpu"))
    for protocol in (Batches, Keeps, Reads):
        assert isinstance(task, protocol)


def test_other_utterances_are_told_from_those_that_a_run_began_with(options):
    task = APP.build(options(), torch.device("cpu"))
    corpus, kept = task.corpus, task.kept()
    tests = {name: group[:-1] for name, group in corpus.tests.items()}
    others = {"train_data": replace(corpus, train=corpus.train[::-1]), "test_data": replace(corpus, tests=tests)}
    for name, other in others.items():
        now = replace(task, corpus=other).kept()
        assert {key for key in kept if kept[key] != now[key]} == {name}


def own(algorithm):
    return " --density 0.1" if any(flag.name == "density" for flag in entries_of(APP)[algorithm].flags) else ""


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "flags",
    ["--algorithm gtopk --density 0.1 --spec-augment", "--no-bucketing --momentum 0.5"]
    + [f"--algorithm {algorithm}{own(algorithm)}" for algorithm in entries_of(APP)],
)
def test_killed_in_the_middle_of_an_epoch_and_resumed(options, flags):
    straight = options(f"{flags} --checkpoint-every 1", run="straight")
    train(APP, straight, 2)
    rows = read_metrics(straight.output / "metrics.jsonl")
    assert [row["steps"] for row in rows] == [2, 4]
    assert all(row[name] >= 0 for row in rows for name in ("train_loss", "test_loss", "wer", "cer"))
    broken = options(f"{flags} --checkpoint-every 1", run="broken")
    assert killed_after(14, APP, broken, 2)
    newest = max(path.parent.name for path in broken.output.glob("checkpoints/*/manifest.json"))
    state = torch.load(broken.output / "checkpoints" / newest / "rank1.pt", weights_only=True)
    assert state["position"]["step"] > 0
    train(APP, options(f"{flags} --checkpoint-every 1 --resume", run="broken"), 2)
    assert_same_bits(result(broken), result(straight))


def test_it_learns(data, tmp_path):
    """Tones for letters, until it writes down what it was trained on."""
    flags = "--dataset manifest --rnn gru --hidden 16 --layers 1 --batch-size 3 --max-epochs 40 --lr 0.02 --seed 1"
    (tmp_path / "data").mkdir()
    for file in data.iterdir():
        (tmp_path / "data" / file.name).write_bytes(file.read_bytes())
    (tmp_path / "data" / "test.csv").write_text((data / "train.csv").read_text())
    assert main(APP, [*flags.split(), "--checkpoint-every=0", "--output=run"]) == 0
    assert read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["cer"] < 0.2


def test_spec_augment_changes_training_and_not_testing(options):
    plain, masked = (APP.build(options(flags), torch.device("cpu")) for flags in ("", "--spec-augment"))
    (indices, *_), (tested, *_) = (
        plain.train_batches(rank=0, size=1, batch_size=2, seed=0, epoch=0),
        plain.test_batches(rank=0, size=1),
    )
    assert not torch.equal(plain.read_train(indices, 7).spectrograms, masked.read_train(indices, 7).spectrograms)
    assert torch.equal(masked.read_train(indices, 7).spectrograms, masked.read_train(indices, 7).spectrograms)
    assert not torch.equal(masked.read_train(indices, 8).spectrograms, masked.read_train(indices, 7).spectrograms)
    assert torch.equal(plain.read_test(tested).spectrograms, masked.read_test(tested).spectrograms)


def test_batches_are_shuffled_by_the_seed_that_all_apps_shuffle_by(options):
    task = APP.build(options("--no-bucketing"), torch.device("cpu"))
    given = {"rank": 0, "size": 1, "batch_size": 6}
    drawn = np.random.Generator(np.random.PCG64(derived_seed(5, SHUFFLE, 3)))
    assert torch.cat(task.train_batches(seed=5, epoch=3, **given)).tolist() == drawn.permutation(6).tolist()


def test_an_utterance_scores_the_same_in_any_batch(options):
    task = APP.build(options(), torch.device("cpu"))
    task.model.eval()
    with torch.no_grad():
        together = sum(task.score(task.read_test(batch)) for batch in task.test_batches(rank=0, size=1))
        dealt = [batch for rank in range(5) for batch in task.test_batches(rank=rank, size=5)]  # two of them empty
        alone = sum(task.score(task.read_test(batch)) for batch in dealt)
    assert any(len(batch.indices) == 0 for batch in dealt)
    torch.testing.assert_close(together, alone)


def test_groups_of_tests_have_names(tmp_path):
    tiny_speech.librispeech(tmp_path)
    given = parse([*TINY.split(), "--dataset=librispeech", f"--data-dir={tmp_path}"], APP, world_size=None)
    task = APP.build(given, torch.device("cpu"))
    sums = torch.tensor([3.0, 2, 1, 4, 1, 8, 9.0, 9, 2, 4, 2, 8], dtype=torch.float64)
    expected = {"test_loss": 1.5, "wer": 0.25, "cer": 0.125, "wer_test_other": 0.5, "cer_test_other": 0.25}
    assert task.metrics(sums) == expected


def test_flags_shape_the_model(options):
    flags = "--dnn lstman4 --rnn gru --hidden 6 --layers 3 --directions both"
    size = size_of(options(flags))
    assert (size.cell, size.hidden, size.layers, size.bidirectional) == ("gru", 6, 3, True)
    assert size_of(options("--dnn deepspeech2 --directions forwards")).bidirectional is False


def refusal(flags, capsys):
    capsys.readouterr()
    code = main(APP, flags)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    return code, lines[0]


@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        ("--dnn lstm", 2, "lstm is a model of another app: python -m thinwire_text"),
        ("--download", 2, "--download has no effect on thinwire_deepspeech"),
        ("--label-smoothing 0.1", 2, "--label-smoothing 0.1 has no effect on thinwire_deepspeech"),
        ("--elastic head:1", 2, "--elastic head:1 has no effect on thinwire_deepspeech"),
        ("--dataset spoken-digits --skip-bad", 2, "--skip-bad has no effect on spoken-digits, which are made"),
        ("--hidden 0", 2, "given '0'"),
        ("--dataset an4 --data-dir nowhere", 1, "missing: nowhere/an4/etc/an4_train.fileids"),
        ("transcribe nowhere a.wav", 1, "no run"),
        ("transcribe", 2, "the following arguments are required: RUN, FILE"),
    ],
)
def test_wrong_flags(flags, code, says, capsys):
    found, message = refusal(flags.split(), capsys)
    assert (found, says in message) == (code, True), message


def test_a_transcript_too_long_for_its_sound_is_found_when_it_is_loaded(tmp_path, capsys):
    folder = tiny_speech.manifest(tmp_path / "data")
    listed = (folder / "train.csv").read_text()
    (folder / "train.csv").write_text(listed.replace("0.wav,a", "0.wav,aabb"))  # 6 frames, of 0.2 s, as it needs
    flags = [*TINY.split(), f"--data-dir={folder}", "--max-epochs=1", "--warmup-epochs=0"]
    assert main(APP, [*flags, "--output=fits"]) == 0
    (folder / "train.csv").write_text(listed.replace("0.wav,a", "0.wav,aabba"))
    code, message = refusal([*flags, "--output=long"], capsys)
    assert code == 1
    assert "0.wav: its 5 characters need 7 frames, the model makes 6 of its 0.20 s" in message
    assert main(APP, [*flags, "--output=skips", "--skip-bad"]) == 0
    assert "--skip-bad left out 1: " in capsys.readouterr().out
    assert read_metrics(Path("skips") / "metrics.jsonl")[0]["skipped"] == 1


def test_utterances_that_are_left_out_are_told_once(tmp_path, capsys):
    folder = tiny_speech.manifest(tmp_path / "data")
    (folder / "0.wav").unlink()
    flags = [*TINY.split(), f"--data-dir={folder}", "--skip-bad", "--max-epochs=1", "--warmup-epochs=0"]
    train(APP, parse([*flags, "--output=run"], APP, world_size=None), 3)
    said = capsys.readouterr()
    assert (said.out.count("0.wav is missing"), said.err.count("0.wav is missing")) == (1, 0)


def damaged_inside(folder):
    tiny_speech.damaged_inside(folder)
    return "librispeech", folder, r"19-198-0001\.flac .*: take it off its list \(.*19-198\.trans\.txt, line 2\)"


def not_finite(folder):
    samples = tiny_speech.sound("ABCD")
    samples[50] = float("inf")
    soundfile.write(tiny_speech.manifest(folder) / "0.wav", samples, tiny_speech.RATE, subtype="FLOAT")
    return "manifest", folder, r"0\.wav has samples that are not .*: take it off its list \(.*train\.csv, line 2\)"


def gone_meanwhile(folder):
    return (
        "an4",
        tiny_speech.an4(folder),
        r"-b\.raw is missing.*list \(.*an4_train\.transcription, line 1, and ",
    )


@pytest.mark.parametrize("damage", [damaged_inside, not_finite, gone_meanwhile])
def test_what_only_reading_shows_ends_the_run_and_says_which_list_to_take_it_off(tmp_path, damage):
    dataset, folder, says = damage(tmp_path / "data")
    given = [*TINY.split(), f"--dataset={dataset}", f"--data-dir={folder}", "--skip-bad"]
    task = APP.build(parse(given, APP, world_size=None), torch.device("cpu"))
    for path in folder.rglob("an251-fash-b.raw"):
        path.unlink()
    with pytest.raises(RunError, match=says):
        task.read_train(torch.arange(task.train_size), 0)


def test_nothing_left(tmp_path, capsys):
    folder = tiny_speech.manifest(tmp_path / "data", tests=1)
    (folder / "6.wav").unlink()
    code, message = refusal([*TINY.split(), f"--data-dir={folder}", "--skip-bad"], capsys)
    assert (code, "no utterance is left to train on, or none to test with" in message) == (1, True)
    assert "6.wav is missing" in message


def test_transcribe_prints_what_the_evaluation_heard(data, options, capsys):
    given = options("--max-epochs 1")
    train(APP, given, 1)
    task = APP.build(given, torch.device("cpu"))
    run = trained(APP, given.output)
    run.into(task.model)
    batch = task.read_test(task.test_batches(rank=0, size=1)[0])
    with torch.no_grad():
        expected = dict(zip(batch.transcripts, heard_in(*task.model(batch.spectrograms, batch.lengths)), strict=True))
    files = {utterance.transcript: utterance.name for utterance in task.corpus.tests["test"]}
    capsys.readouterr()
    assert main(APP, ["transcribe", str(given.output), *files.values(), "--words"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for transcript, file in files.items():
        assert f"{file}: {' '.join(expected[transcript].split())}" in lines
    soundfile.write("slow.wav", tiny_speech.sound("AB"), 8000)
    code, message = refusal(["transcribe", str(given.output), "slow.wav", "--beam", "3"], capsys)
    assert (code, "slow.wav is at 8,000 Hz" in message) == (1, True)


def test_words_are_within_their_file(data, options):
    task = APP.build(options("--hidden 8"), torch.device("cpu"))
    model = task.model.eval()
    for beam in (None, 4):
        text, found = transcribed(model, data / "3.wav", beam=beam)
        assert text.split() == [word.text for word in found]
        assert all(0 <= word.start < word.end <= 0.8 + 0.04 for word in found)


@pytest.mark.mpi
def test_it_starts_its_own_workers_and_torchrun_starts_it(data, tmp_path):
    flags = ["-m", "deepspeech", *TINY.split(), f"--data-dir={data}", "--max-epochs=1", "--warmup-epochs=0"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    alone = [sys.executable, *flags, "--nworkers=2", "--oversubscribe", "--output=own"]
    under = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *flags, "--output=tr"]
    for command in (alone, under):
        done = subprocess.run(command, env=environment, cwd=tmp_path, timeout=200, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    own, torchruns = (read_metrics(tmp_path / run / "metrics.jsonl")[0] for run in ("own", "tr"))
    assert own["world_size"] == torchruns["world_size"] == 2
    assert own["test_loss"] == pytest.approx(torchruns["test_loss"], rel=1e-4)
