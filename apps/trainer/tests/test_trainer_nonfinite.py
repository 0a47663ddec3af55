"""A gradient that is not finite on one rank: an error on all, or a step that none takes."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from communicators import CollectiveError, SimulatedWorld
from thinwire_trainer.app import App
from thinwire_trainer.command_line.options import Options
from thinwire_trainer.errors import AgreedError
from thinwire_trainer.records.metrics import read_metrics
from thinwire_trainer.records.run_folder import RunFolder
from thinwire_trainer.run import run
from thinwire_trainer.synchronisers.table import TABLE


def without_statistics() -> torch.nn.Module:
    """No batch normalisation, of which evaluation averages the statistics."""
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 3))


def app_with_one_bad_image(app: App) -> App:
    def build(options: Options, device: torch.device) -> Any:
        task = app.build(options, device)
        task.points[7] = torch.inf
        task.model = without_statistics()
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


PERIODIC = [name for name, entry in TABLE.items() if "sync_every" in {flag.name for flag in entry.flags}]


@pytest.mark.parametrize("algorithm", PERIODIC)
def test_no_checkpoint_is_made_of_parameters_that_are_not_finite_and_the_last_ones_stay(
    app: App, options: Callable[..., Options], algorithm: str
) -> None:
    """Two epochs go well, then rank 1 has an infinite loss; an average, which would see it, is far away."""

    def body(comm: Any) -> None:
        def build(options: Options, device: torch.device) -> Any:
            task = app.build(options, device)
            task.model = without_statistics()
            real, calls = task.loss, iter(range(100))

            def loss(indices: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
                spoilt: bool = comm.rank == 1 and next(calls) >= 6
                loss: torch.Tensor = real(indices, generator) * (torch.inf if spoilt else 1.0)
                return loss

            task.loss = loss
            return task

        run(replace(app, build=build), given, comm)

    given = options(algorithm=algorithm, sync_every=90, max_epochs=9)
    with pytest.raises(AgreedError, match=r"^NaN or inf in '.*weight' and . more: no checkpoint .* rank 1 of 2\)$"):
        SimulatedWorld(2).run(body)
    kept = RunFolder(given.output).checkpoints.complete()
    assert [folder.name for folder in kept] == ["00000003", "00000006"]
    for file in (file for folder in kept for file in folder.glob("rank*")):
        assert all(bool(p.isfinite().all()) for p in torch.load(file, weights_only=True)["model"].values())


def watched(task: Any, seen: list[dict[str, Any]]) -> Any:
    """With a bad image; its buffers before every step go to `seen`."""
    task.points[7] = torch.inf
    real = task.loss

    def loss(indices: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        seen.append({name: own.clone() for name, own in task.model.named_buffers()})
        loss: torch.Tensor = real(indices, generator)
        return loss

    task.loss = loss
    return task


SKIPPING = [name for name, entry in TABLE.items() if "nonfinite" in {flag.name for flag in entry.flags}]


@pytest.mark.few(8)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("algorithm", SKIPPING)
def test_a_skipped_step_leaves_the_statistics_as_they_were(
    app: App, options: Callable[..., Options], algorithm: str, overlap: bool
) -> None:
    """On all ranks alike: on the one that met the bad image they would stay NaN, on the others be one step ahead."""
    buffers: dict[int, list[dict[str, Any]]] = {0: [], 1: []}  # by rank: before each step, and at the end

    def app_of(rank: int) -> App:
        return replace(app, build=lambda options, device: watched(app.build(options, device), buffers[rank]))

    given = options(algorithm=algorithm, nonfinite="skip", **({"overlap": True} if overlap else {}))
    SimulatedWorld(2).run(lambda comm: run(app_of(comm.rank), given, comm))
    folder = RunFolder(given.output)
    rows = read_metrics(folder.metrics.path)
    assert [row["skipped_steps"] for row in rows] == [1, 2]
    assert all(row["test_loss"] is not None for row in rows)
    assert all(bool(tensor.isfinite().all()) for tensor in torch.load(folder.model, weights_only=True).values())
    for rank, seen in buffers.items():
        state = torch.load(folder.checkpoints.complete()[-1] / f"rank{rank}.pt", weights_only=True)["model"]
        seen.append({name: state[name] for name in seen[0]})
        alike = [all(before[name].equal(after[name]) for name in before) for before, after in pairwise(seen)]
        assert alike.count(True) == 2, "every skipped step leaves all of them, and every other step changes them"
        assert int(state["1.num_batches_tracked"]) == 4
