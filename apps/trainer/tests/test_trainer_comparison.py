"""Trainings side by side: they replace those of the comparison before, and nobody else's."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from communicators import as_communicator
from resumed_runs import train
from thinwire_trainer.app import App
from thinwire_trainer.command_line.options import Options
from thinwire_trainer.comparison import compared
from thinwire_trainer.errors import AgreedError

FLAGS = {name: [f"--algorithm={name}", "--max-epochs=1", "--batch-size=8"] for name in ("dense", "gtopk")}


def test_a_run_that_is_no_comparisons_stays(app: App, options: Callable[..., Options], tmp_path: Path) -> None:
    def compare() -> list[str]:
        return list(compared(app, FLAGS, tmp_path, as_communicator(None), device=torch.device("cpu")))

    mine = options(output=tmp_path / "gtopk")
    train(app, mine, 1)
    model = (mine.output / "model.pt").read_bytes()
    with pytest.raises(AgreedError, match="gtopk already holds a run of yours"):
        compare()
    assert (mine.output / "model.pt").read_bytes() == model
    assert not (tmp_path / "dense").exists(), "refused before training"
    for file in (mine.output / "config.json", mine.output / "model.pt", mine.output / "metrics.jsonl"):
        file.unlink()
    with pytest.raises(AgreedError, match="gtopk already holds"):  # its checkpoints
        compare()
    (tmp_path / "gtopk").rename(tmp_path / "away")
    assert compare() == compare() == ["dense", "gtopk"]
    train(app, replace(mine, overwrite=True), 1)
    with pytest.raises(AgreedError, match="gtopk already holds a run of yours"):
        compare()
