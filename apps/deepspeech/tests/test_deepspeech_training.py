"""The app under the trainer: resume, every algorithm, wrong flags, own launch, torchrun, transcribe."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import soundfile
import tiny_speech
import torch
from deepspeech.__main__ import APP
from deepspeech.recognition import heard_in, size_of
from deepspeech.transcribe import transcribed
from resumed_runs import assert_same_bits, killed_after, result, train
from trainer.app import Batches, Keeps, Reads
from trainer.command import main
from trainer.command_line.flags import entries_of, parse
from trainer.launching.placement import LAUNCHERS
from trainer.records.metrics import read_metrics
from trainer.trained import trained

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


@pytest.mark.parametrize("flags", ["--algorithm gtopk --density 0.1 --spec-augment", "--no-bucketing --momentum 0.5"])
def test_killed_in_the_middle_of_an_epoch_and_resumed(options, flags):
    straight = options(f"{flags} --checkpoint-every 1", run="straight")
    train(APP, straight, 2)
    broken = options(f"{flags} --checkpoint-every 1", run="broken")
    assert killed_after(14, APP, broken, 2)
    left = [int(path.name) for path in (broken.output / "checkpoints").iterdir() if path.name.isdigit()]
    assert left
    train(APP, options(f"{flags} --checkpoint-every 1 --resume", run="broken"), 2)
    assert_same_bits(result(broken), result(straight))


@pytest.mark.parametrize("algorithm", entries_of(APP))
def test_every_algorithm_trains(options, algorithm):
    given = options(f"--algorithm {algorithm} --max-epochs 1")
    train(APP, given, 2)
    (row,) = read_metrics(given.output / "metrics.jsonl")
    assert row["steps"] == 2
    assert all(row[name] >= 0 for name in ("train_loss", "test_loss", "wer", "cer"))


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
        ("--dnn lstm", 2, "lstm is a model of another app: python -m text"),
        ("--download", 2, "this app fetches nothing"),
        ("--label-smoothing 0.1", 2, "label-smoothing"),
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
    assert "1 of 9 utterances are left out; the first one: " in capsys.readouterr().err
    assert trained(APP, Path("skips")).kept["skipped"] == 1


def test_nothing_left(tmp_path, capsys):
    folder = tiny_speech.manifest(tmp_path / "data", tests=1)
    (folder / "6.wav").unlink()
    code, message = refusal([*TINY.split(), f"--data-dir={folder}", "--skip-bad"], capsys)
    assert (code, "no utterance is left to train on, or none to test with" in message) == (1, True)


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
