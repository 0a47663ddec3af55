"""A gradient that is not finite on one rank: an error on all, or a step that none takes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from communicators import CollectiveError, SimulatedWorld
from trainer.app import App
from trainer.command_line.options import Options
from trainer.records.metrics import read_metrics
from trainer.records.run_folder import RunFolder
from trainer.run import run


def app_with_one_bad_image(app: App) -> App:
    def build(options: Options, device: torch.device) -> Any:
        task = app.build(options, device)
        task.points[7] = torch.inf
        task.model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 3))
        return task

    return replace(app, build=build)


@pytest.mark.parametrize("algorithm", ["dense", "gtopk"])
def test_one_bad_image_costs_a_step_an_epoch_or_ends_the_run(
    app: App, options: Callable[..., Options], algorithm: str
) -> None:
    bad = app_with_one_bad_image(app)
    given = options(algorithm=algorithm, nonfinite="skip", momentum=0.9)
    SimulatedWorld(2).run(lambda comm: run(bad, given, comm))
    folder = RunFolder(given.output)
    model = torch.load(folder.model, weights_only=True)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in model.values())
    rows = read_metrics(folder.metrics.path)
    assert [row["train_loss"] for row in rows] == [None, None]  # as it was: not a number
    assert all(row["test_loss"] is not None for row in rows)
    assert [row["skipped_steps"] for row in rows] == [1, 2]
    states = [torch.load(file, weights_only=True) for file in sorted(folder.checkpoints.complete()[-1].glob("rank*"))]
    assert [state["optimizer"]["distributed"]["skipped"] for state in states] == [2, 2]
    stern = options(algorithm=algorithm, momentum=0.9, overwrite=True)
    with pytest.raises(CollectiveError, match=r"rank [01]: the gradient of '0\.weight' is not finite"):
        SimulatedWorld(2).run(lambda comm: run(bad, stern, comm))


def test_a_run_whose_steps_were_all_skipped_is_gone_on_with(app: App, options: Callable[..., Options]) -> None:
    def build(options: Options, device: torch.device) -> Any:
        task = app_with_one_bad_image(app).build(options, device)
        task.points[:] = torch.inf
        return task

    bad = replace(app, build=build)
    given = options(nonfinite="skip", momentum=0.9, max_epochs=1, lr_schedule="constant")
    SimulatedWorld(2).run(lambda comm: run(bad, given, comm))
    longer = replace(given, max_epochs=2, resume="latest")
    SimulatedWorld(2).run(lambda comm: run(bad, longer, comm))
    rows = read_metrics(RunFolder(given.output).metrics.path)
    assert [(row["steps"], row["skipped_steps"]) for row in rows] == [(3, 3), (6, 6)]


def test_statistics_that_a_bad_image_spoilt_do_not_end_a_run_that_skips(
    app: App, options: Callable[..., Options]
) -> None:
    """Batch normalisation has seen it although no step was taken; the evaluation shows what became of that."""

    def build(options: Options, device: torch.device) -> Any:
        task = app.build(options, device)
        task.points[7] = torch.inf
        return task

    given = options(nonfinite="skip")
    SimulatedWorld(2).run(lambda comm: run(replace(app, build=build), given, comm))
    rows = read_metrics(RunFolder(given.output).metrics.path)
    assert [(row["skipped_steps"], row["test_loss"]) for row in rows] == [(1, None), (2, None)]
    model = torch.load(RunFolder(given.output).model, weights_only=True)
    assert all(bool(tensor.isfinite().all()) for name, tensor in model.items() if "running" not in name)
