"""Data that cannot be used: named, or left out, told once and counted."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from resumed_runs import train
from thinwire_trainer.app import App, LeavesOut, Task
from thinwire_trainer.command_line.options import Options
from thinwire_trainer.data import Faults, read_text
from thinwire_trainer.errors import RunError
from thinwire_trainer.records.metrics import read_metrics


def read(path: Path, *, skip: bool) -> Faults:
    faults = Faults(skip=skip)
    with faults.one():
        read_text(path)
    return faults


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "is missing"),
        (b" \n", "is empty"),
        (b"a\nb\xff", r"line 2, is not UTF-8 \(byte 0xff\): convert it"),
        (b"\xef\xbb\xbfa\n\xff", r"line 2, is not UTF-8 \(byte 0xff\): convert it"),
    ],
)
def test_a_faulty_text_is_named_or_left_out(tmp_path: Path, content: bytes | None, says: str) -> None:
    path = tmp_path / "a.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RunError, match=rf"a\.txt(,)? {says} \(--skip-bad leaves such data out, and counts them\)"):
        read(path, skip=False)
    faults = read(path, skip=True)
    assert len(faults.found) == 1
    assert faults.counted() == {"skipped": 1}


def test_a_text_that_cannot_be_read_is_a_fault_of_its_own(tmp_path: Path) -> None:
    """As without permission, which an administrator cannot be without."""
    with pytest.raises(RunError, match=r"cannot be read: Is a directory .*--skip-bad"):
        read(tmp_path, skip=False)
    faults = Faults(skip=True)
    with faults.one():
        raise PermissionError(13, "Permission denied", "b.wav")
    assert faults.found == ["b.wav cannot be read: Permission denied"]


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the cat\n", encoding="utf-8-sig")
    assert read_text(tmp_path / "a.txt") == "the cat\n"


def test_the_first_reasons_are_told_and_how_many_there_are() -> None:
    faults = Faults(skip=True)
    assert (faults.told(), faults.counted()) == ("", {"skipped": 0})
    for number in range(5):
        with faults.one():
            raise RunError(f"{number}.wav is missing")
    told = "--skip-bad left out 5: 0.wav is missing; 1.wav is missing; 2.wav is missing; and 2 more"
    assert faults.told() == told
    assert Faults(skip=False).counted() == {}


def test_a_run_tells_once_what_was_left_out_and_counts_it(
    app: App, options: Callable[..., Options], capsys: pytest.CaptureFixture[str]
) -> None:
    def build(options: Options, device: torch.device) -> Task:
        task = app.build(options, device)
        task.faults = Faults(skip=True, found=["a.wav is missing"])  # type: ignore[attr-defined]
        assert isinstance(task, LeavesOut)
        return task

    given = options()
    train(replace(app, build=build), given, 2)
    assert capsys.readouterr().out.count("--skip-bad left out 1: a.wav is missing") == 1
    assert [row["skipped"] for row in read_metrics(given.output / "metrics.jsonl")] == [1, 1]
