"""metrics.jsonl."""

from pathlib import Path

import pytest
from trainer.errors import RunError
from trainer.metrics import MetricsFile, read_metrics


def test_rows_come_back_and_are_cut_to_a_checkpoint(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    assert file.nbytes == 0
    file.append({"epoch": 1, "train_loss": 0.1 + 0.2})
    at_checkpoint = file.nbytes
    file.append({"epoch": 2, "train_loss": None})
    assert read_metrics(file.path) == [{"epoch": 1, "train_loss": 0.1 + 0.2}, {"epoch": 2, "train_loss": None}]
    file.truncate(at_checkpoint)
    assert [row["epoch"] for row in read_metrics(file.path)] == [1]


def test_a_file_shorter_than_at_the_checkpoint_is_refused(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.truncate(0)
    file.append({"epoch": 1})
    with pytest.raises(RunError, match="put the file back"):
        file.truncate(file.nbytes + 1)
