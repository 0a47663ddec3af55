"""The demo, from digits to table."""

from functools import partial
from io import StringIO

import pytest
from rich.console import Console
from thinwire_deepspeech import demo
from thinwire_deepspeech.comparison import Outcome, outcome, show
from thinwire_deepspeech.data import spoken_digits
from thinwire_deepspeech.data.spoken_digits import plan
from thinwire_trainer.launching.placement import LAUNCHERS
from thinwire_trainer.records.metrics import read_metrics


def test_the_table_fits_a_terminal_and_has_means_and_spans():
    runs = [
        Outcome(wer=0.05, wer_voices=0.2, seconds=10, nbytes=1000),
        Outcome(wer=0.07, wer_voices=0.1, seconds=20, nbytes=3000),
    ]
    shown = StringIO()
    show({"dense": runs, "gtopk": runs[:1]}, ranks=2, console=Console(file=shown, width=80))
    dense, gtopk = (line for line in shown.getvalue().splitlines() if "dense" in line or "gtopk" in line)
    assert [cell.strip() for cell in dense.split("│")[1:-1]] == [
        "dense",
        "6.0 (5.0 … 7.0)",
        "15.0 (10.0 … 20.0)",
        "2,000",
        "15 s",
    ]
    assert [cell.strip() for cell in gtopk.split("│")[1:-1]] == ["gtopk", "5.0", "20.0", "1,000", "10 s"]
    assert "synthetic" in shown.getvalue()


def test_an_outcome_is_of_the_last_epoch_and_of_all_seconds():
    rows = [
        {"wer": wer, "wer_voices": 2 * wer, "seconds": 3.0, "bytes_sent": 50, "steps": steps}
        for wer, steps in ((0.5, 5), (0.25, 10))
    ]
    assert outcome(rows) == Outcome(wer=0.25, wer_voices=0.5, seconds=6.0, nbytes=10.0)


def test_it_trains_with_both_and_shows_them(tmp_path, monkeypatch, capsys):
    pytest.importorskip("espeakng_loader", reason="espeak-ng's library (pip install espeakng-loader) is not installed")
    for variables in LAUNCHERS.values():
        for variable in variables:
            monkeypatch.delenv(variable, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(spoken_digits, "plan", partial(plan, train=4, tests=2))
    assert demo.main(["--simulated", "--max-epochs", "1", "--seeds", "2"]) == 0
    shown = capsys.readouterr().out
    assert "python -m thinwire_deepspeech transcribe runs/demo-speech/gtopk-0 FILE.wav" in shown
    for algorithm in ("dense", "gtopk"):
        assert [line for line in shown.splitlines() if line.startswith(f"│ {algorithm} ")], shown
        rows = [read_metrics(tmp_path / f"runs/demo-speech/{algorithm}-{seed}/metrics.jsonl")[0] for seed in (0, 1)]
        assert rows[0]["train_loss"] != rows[1]["train_loss"]
        assert rows[0]["algorithm"] == algorithm
