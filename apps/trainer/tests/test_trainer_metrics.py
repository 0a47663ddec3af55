"""metrics.jsonl."""

import os
import sys
from collections.abc import Callable
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest
from communicators import SimulatedWorld
from thinwire_trainer.app import App
from thinwire_trainer.command_line.options import Options
from thinwire_trainer.errors import DamagedError, RunError
from thinwire_trainer.records.metrics import MetricsFile, TrainingProgress, read_metrics
from thinwire_trainer.records.run_folder import RunFolder
from thinwire_trainer.run import run

pytestmark = pytest.mark.quick


def test_rows_come_back_and_are_cut_to_a_checkpoint(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    assert file.digest()[0] == 0
    file.append({"epoch": 1, "train_loss": 0.1 + 0.2})
    at_checkpoint = file.digest()
    file.append({"epoch": 2, "train_loss": None})
    assert read_metrics(file.path) == [{"epoch": 1, "train_loss": 0.1 + 0.2}, {"epoch": 2, "train_loss": None}]
    file.check(*at_checkpoint)
    file.truncate(at_checkpoint[0])
    assert [row["epoch"] for row in read_metrics(file.path)] == [1]
    assert file.digest() == at_checkpoint


def test_a_file_that_does_not_begin_as_at_the_checkpoint_is_refused(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.truncate(0)
    file.append({"epoch": 1})
    nbytes, sha256 = file.digest()
    with pytest.raises(DamagedError, match=f"{nbytes} bytes, .* there were {nbytes + 1}"):
        file.check(nbytes + 1, sha256)
    file.path.write_bytes(b'{"epoch": 2}\n')
    with pytest.raises(DamagedError, match="its checksum is another one"):
        file.check(nbytes, sha256)
    file.check(nbytes, None)  # a checkpoint from before there were checksums of it


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    os.mkfifo(file.path)
    with pytest.raises(DamagedError, match="a pipe"):
        file.check(0, None)


def test_a_run_that_is_overwritten_leaves_no_curve_behind(tmp_path: Path) -> None:
    """TensorBoard would show those of the deleted run as if they were the new one's."""
    folder = RunFolder(tmp_path)
    folder.begin({"seed": 0}, kept=None, overwrite=False)
    (tmp_path / "events").mkdir()
    for name in ("events.out.tfevents.17.host.3.0", "notes.txt"):
        (tmp_path / "events" / name).write_text("")
    folder.begin({"seed": 1}, kept=None, overwrite=True)
    assert [path.name for path in (tmp_path / "events").iterdir()] == ["notes.txt"]
    (tmp_path / "events" / "notes.txt").unlink()
    folder.begin({"seed": 2}, kept=None, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json"]


@pytest.mark.parametrize("folder", ["runs/[lr 1]/a", "runs/[/a]", "runs/:smile:"])
def test_a_note_is_printed_as_it_is(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    progress = TrainingProgress("dense", epochs=1, steps_per_epoch=1, quiet=False)
    progress.note(f"dense: metrics and model in {folder}")
    assert capsys.readouterr().out == f"dense: metrics and model in {folder}\n"


def test_the_line_of_an_epoch_says_which_figures_are_not_finite(capsys: pytest.CaptureFixture[str]) -> None:
    progress = TrainingProgress("dense", epochs=9, steps_per_epoch=1, quiet=False)
    progress.epoch({"epoch": 1, "steps": 4, "train_loss": None, "test_loss": 0.25, "rest_seconds": 0.5})
    assert capsys.readouterr().out == "dense  epoch   1/9  train_loss null  test_loss 0.25\n"


def test_what_was_not_exchanged_yet_is_in_no_row(app: App, options: Callable[..., Options], tmp_path: Path) -> None:
    asked = options(algorithm="diloco", sync_every=1000)
    SimulatedWorld(2).run(lambda comm: run(app, asked, comm))
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row.get("hidden_fraction", "none yet") for row in rows] == ["none yet", 0.0]


def test_a_note_goes_to_a_terminal_that_has_not_all_letters(monkeypatch: pytest.MonkeyPatch) -> None:
    written = BytesIO()
    monkeypatch.setattr(sys, "stdout", TextIOWrapper(written, encoding="ascii"))
    TrainingProgress("dense", epochs=1, steps_per_epoch=1, quiet=False).note("model in \u00fcber")
    sys.stdout.flush()
    assert written.getvalue() == b"model in \\xfcber\n"


def test_a_pipe_that_nobody_reads_any_more_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as of `python -m cifar | head`; all ranks are told of it, as of a full disk."""

    class Broken(TextIOWrapper):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Broken(BytesIO()))
    progress = TrainingProgress("dense", epochs=1, steps_per_epoch=1, quiet=False)
    with pytest.raises(BrokenPipeError, match=r"nobody reads it any more: 'standard output'"):
        progress.note("dense")


@pytest.mark.parametrize("kept", [None, {"vocabulary": "abc"}])
def test_a_run_that_was_killed_before_it_had_its_settings_begins_anew(
    tmp_path: Path, kept: dict[str, str] | None
) -> None:
    folder = RunFolder(tmp_path)
    folder.begin({"seed": 0}, kept={"vocabulary": "a"}, overwrite=False)
    folder.config.unlink()  # it is written last
    folder.begin({"seed": 1}, kept=kept, overwrite=False)
    folder.require_kept(kept)
    assert folder.recorded() == {"seed": 1}


def test_somebodys_task_json_is_not_taken_for_a_run_s(tmp_path: Path) -> None:
    (tmp_path / "task.json").write_text("{}")
    with pytest.raises(RunError, match="already holds a run"):
        RunFolder(tmp_path).require_empty()
    assert (tmp_path / "task.json").read_text() == "{}"
