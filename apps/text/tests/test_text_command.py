"""The command line, runs of both kinds, and what can be done with what they trained."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import text_files
import torch
from resumed_runs import assert_same_bits, killed_after, result
from text_files import asked
from thinwire_text.__main__ import APP
from thinwire_text.generate import continued
from thinwire_text.models.transformer import transformer_small
from thinwire_trainer.command import main
from thinwire_trainer.command_line.options import Options
from thinwire_trainer.errors import AgreedError, RunError
from thinwire_trainer.records.metrics import read_metrics
from thinwire_trainer.run import run as run_rank
from thinwire_trainer.synchronisers.table import TABLE

TINY = "--hidden 8 --batch-size 3 --window 5 --max-epochs 2 --dataset ptb"
FAST = "--dnn lstmimdb --dataset imdb --hidden 16 --batch-size 2 --max-epochs 25 --lr 0.3"


def language(tmp_path: Path, *words: str, dnn: str = "lstm-small", output: str = "run") -> Options:
    """Options for a tiny language model on a tiny treebank."""
    text_files.ptb(tmp_path / "ptb")
    where = ["--data-dir", str(tmp_path), "--output", str(tmp_path / output)]
    return asked("--dnn", dnn, *TINY.split(), *where, *(("--hidden", "32") if "former" in dnn else ()), *words)


def sentiment(tmp_path: Path, *words: str) -> Options:
    """Options for a tiny classifier of six reviews."""
    if not (tmp_path / "aclImdb").exists():
        text_files.imdb(tmp_path)
    where = ["--data-dir", str(tmp_path), "--output", str(tmp_path / "run")]
    return asked(*FAST.split(), *where, *words)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--dnn lstm --dataset imdb", "--dataset imdb is for --dnn lstmimdb, not lstm"),
        ("--dnn lstmimdb", "--dnn lstmimdb is for --dataset imdb, not pydoc"),
        ("--dnn lstmimdb --dataset imdb --tied", "--tied has no effect on lstmimdb"),
        ("--length 9", "--length has no effect on lstm-small"),
        ("--held-out valid", "--held-out valid is for ptb"),
        ("--dropout 1", "argument --dropout: given '1', expected 0 <= dropout < 1"),
        ("--dnn transformer --hidden 33", "--hidden 33 is no multiple of 32, the units of an attention head"),
        ("--skip-bad", "--skip-bad has no effect on pydoc, which reads no files: leave it out"),
        ("--data-dir /nowhere", "--data-dir /nowhere has no effect on pydoc, which reads no files: leave it out"),
        ("--readers 0", "--readers 0 has no effect on lstm-small, whose text is in memory"),
        ("--label-smoothing 0.1", "--label-smoothing 0.1 has no effect on thinwire_text"),
        ("--elastic head:1", "--elastic is not for lstm-small"),
        ("--download", "--download has no effect on thinwire_text: leave it out"),
        ("--window 0", "given '0', expected a whole number from 1 on"),
    ],
)
def test_what_does_not_fit_together_is_refused(words: str, says: str) -> None:
    with pytest.raises(RunError, match=says):
        asked(*words.split())


def test_help_names_models_data_sets_and_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        asked("--help")
    shown = capsys.readouterr().out
    for expected in ("lstmimdb", "{pydoc,ptb,imdb}", "--window T", "python -m thinwire_text generate --help"):
        assert expected in shown


@pytest.mark.parametrize("dnn", ["lstm-small", "transformer-small"])
def test_a_language_model_learns_and_its_perplexity_is_that_of_its_loss(tmp_path: Path, dnn: str) -> None:
    options = language(tmp_path, "--max-epochs", "4", dnn=dnn)
    text_files.train(options, 2)
    rows = read_metrics(options.output / "metrics.jsonl")
    assert rows[-1]["perplexity"] == pytest.approx(math.exp(rows[-1]["test_loss"]))  # type: ignore[arg-type]
    assert rows[-1]["train_loss"] < rows[0]["train_loss"]  # type: ignore[operator]
    assert "skipped" not in rows[0]


@pytest.mark.few(2)
@pytest.mark.parametrize("algorithm", TABLE)
def test_a_run_of_every_algorithm_that_is_killed_goes_on_with_the_same_bits(tmp_path: Path, algorithm: str) -> None:
    """In the middle of an epoch, with hidden state, dropout and clipping; eager runs meet at checkpoints."""
    own = ("--density", "0.2") if any(flag.name == "density" for flag in TABLE[algorithm].flags) else ()
    words = ("--checkpoint-every", "5", "--dropout", "0.3", "--algorithm", algorithm, *own)
    killed_and_resumed(tmp_path, 2, *words)


@pytest.mark.parametrize("dnn", ["lstm-small", "transformer-small"])
def test_dropout_goes_on_with_the_same_bits(tmp_path: Path, dnn: str) -> None:
    killed_and_resumed(tmp_path, 1, "--checkpoint-every", "5", dnn=dnn)


def killed_and_resumed(tmp_path: Path, ranks: int, *words: str, dnn: str = "lstm-small") -> None:
    straight, broken = (language(tmp_path, *words, dnn=dnn, output=name) for name in ("straight", "broken"))
    text_files.train(straight, ranks)
    assert killed_after(18, APP, broken, ranks)
    newest = max(path.parent.name for path in broken.output.glob("checkpoints/*/manifest.json"))
    state = torch.load(broken.output / "checkpoints" / newest / f"rank{ranks - 1}.pt", weights_only=True)
    assert state["position"]["step"] > 0
    assert all(part.abs().sum() > 0 for part in state["task"]["state"])
    assert len(state["task"]["state"]) == (2 if dnn.startswith("lstm") else 0)
    text_files.train(replace(broken, resume="latest"), ranks)
    assert_same_bits(result(broken), result(straight))


def test_a_run_goes_on_only_with_the_same_words(tmp_path: Path) -> None:
    options = language(tmp_path, "--lr-schedule", "constant")
    text_files.train(options, 1)
    train = tmp_path / "ptb" / "ptb.train.txt"
    train.write_text(train.read_text().replace("mats", "rugs"))
    with pytest.raises(AgreedError, match=r"task.json is not what these data give"):
        text_files.train(replace(options, max_epochs=3, resume="latest"), 1)


@pytest.mark.parametrize("part", ["train", "test"])
def test_a_run_goes_on_only_with_the_same_text(tmp_path: Path, part: str) -> None:
    options = language(tmp_path, "--lr-schedule", "constant")
    text_files.train(options, 1)
    file = tmp_path / "ptb" / f"ptb.{part}.txt"
    file.write_text("".join(reversed(file.read_text().splitlines(keepends=True))))
    with pytest.raises(AgreedError, match=rf"task.json is not what these data give \(other {part} data\)"):
        text_files.train(replace(options, max_epochs=3, resume="latest"), 1)


def test_other_settings_are_named_before_other_data(tmp_path: Path) -> None:
    options = language(tmp_path, "--lr-schedule", "constant")
    text_files.train(options, 1)
    file = tmp_path / "ptb" / "ptb.train.txt"
    file.write_text(file.read_text().replace("mats", "rugs"))
    with pytest.raises(AgreedError, match="--window 5 then, 6 now"):
        text_files.train(replace(options, app=options.app | {"window": 6}, resume="latest"), 1)


def test_streams_that_would_be_shorter_than_a_window_are_refused_on_all_ranks(tmp_path: Path) -> None:
    with pytest.raises(AgreedError, match="2 × --batch-size 40 = 80 streams of a text of 252 tokens would be of 3"):
        text_files.train(language(tmp_path, "--batch-size", "40"), 2)


def test_lines_that_are_left_out_are_told_once_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = language(tmp_path, "--skip-bad", "--max-epochs", "1")
    (tmp_path / "ptb" / "ptb.test.txt").write_text("the horse\n the cat sat\n")
    text_files.train(options, 2)
    assert capsys.readouterr().out.count("ptb.test.txt, line 1: horse is not a word of ptb.train.txt") == 1
    assert read_metrics(options.output / "metrics.jsonl")[0]["skipped"] == 1


@pytest.mark.parametrize("dnn", ["lstm-small", "transformer-small"])
def test_generate_goes_on_with_a_prompt_and_needs_no_data(
    tmp_path: Path, dnn: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = language(tmp_path, dnn=dnn)
    text_files.train(options, 1)
    for path in (tmp_path / "ptb").iterdir():
        path.unlink()
    capsys.readouterr()
    command = ["generate", str(options.output), "--prompt", "the cat", "--length", "12"]
    said = []
    for more in ([], [], ["--seed", "1"], ["--temperature", "0"]):
        assert main(APP, [*command, *more]) == 0
        said.append(capsys.readouterr().out)
    assert all(text.startswith("the cat") for text in said)
    assert said[0] == said[1] != said[2]
    assert "<unk>" not in said[0] + said[2]
    assert main(APP, ["classify", str(options.output), "a"]) == 1
    assert "holds a language model (lstm-small)".replace("lstm-small", dnn) in capsys.readouterr().err


def test_a_window_slides_over_what_a_model_without_a_state_has_said() -> None:
    torch.manual_seed(0)
    model = transformer_small(12, window=4, hidden=32).eval()
    given = {"window": 4, "temperature": 0.0, "generator": torch.Generator()}
    long = continued(model, [1, 2, 3, 4, 5, 6], length=3, **given)
    assert long == continued(model, [3, 4, 5, 6], length=3, **given)


@pytest.mark.parametrize("temperature", [1e-30, 1e-320, 5e-324])
def test_towards_temperature_0_it_is_the_likeliest(temperature: float) -> None:
    torch.manual_seed(0)
    model = transformer_small(12, window=4, hidden=32).eval()
    given = {"window": 4, "length": 6, "never": 3}
    coldest, cold = (
        continued(model, [1, 2], temperature=heat, generator=torch.Generator(), **given) for heat in (0.0, temperature)
    )
    assert cold == coldest


def test_sentiment_is_learnt_and_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = sentiment(tmp_path)
    text_files.train(options, 2)
    assert read_metrics(options.output / "metrics.jsonl")[-1]["test_accuracy"] == 1.0
    capsys.readouterr()
    assert main(APP, ["classify", str(options.output), "I loved this wonderful film", "dreadful, I hated it"]) == 0
    one, other = capsys.readouterr().out.splitlines()
    assert one.startswith("pos")
    assert other.startswith("neg")
    assert main(APP, ["classify", str(options.output), "..."]) == 1
    assert "has no word" in capsys.readouterr().err
    assert main(APP, ["generate", str(options.output)]) == 1
    assert "holds a classifier (lstmimdb)" in capsys.readouterr().err
    (options.output / "task.json").unlink()
    assert main(APP, ["classify", str(options.output), "a film"]) == 1
    assert "task.json is missing" in capsys.readouterr().err


def test_reviews_that_are_left_out_are_told_once_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = sentiment(tmp_path, "--skip-bad", "--max-epochs", "1")
    (tmp_path / "aclImdb" / "test" / "pos" / "0_9.txt").write_text("")
    text_files.train(options, 7)  # with ranks that have no review to test
    assert capsys.readouterr().out.count("test/pos/0_9.txt is empty") == 1
    [row] = read_metrics(options.output / "metrics.jsonl")
    assert row["skipped"] == 1
    config = json.loads((options.output / "config.json").read_text())
    assert (config["app"], config["skip_bad"], config["length"]) == ("thinwire_text", True, 400)


@pytest.mark.parametrize("dnn", ["lstm-small", "transformer-small"])
def test_amp_changes_the_numbers_and_not_their_types(tmp_path: Path, dnn: str) -> None:
    losses = []
    for more in ([], ["--amp"]):
        options = language(tmp_path, "--max-epochs", "1", *more, dnn=dnn, output=f"run{len(more)}")
        text_files.train(options, 1)
        losses.append(read_metrics(options.output / "metrics.jsonl")[0]["test_loss"])
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.05)  # type: ignore[arg-type]


def test_one_rank_is_enough(tmp_path: Path) -> None:
    """Outside of any world that is simulated."""
    from communicators import as_communicator

    run_rank(APP, language(tmp_path, "--max-epochs", "1"), as_communicator(None))
