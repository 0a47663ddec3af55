"""What an app may get wrong about its flags, its commands and its task: one line each, on all ranks."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import streams
import torch
from communicators import SimulatedWorld
from resumed_runs import train
from thinwire_trainer.app import App
from thinwire_trainer.command import main
from thinwire_trainer.command_line.flags import parse
from thinwire_trainer.command_line.options import Options
from thinwire_trainer.errors import AgreedError, RunError, UsageError
from thinwire_trainer.run import run
from thinwire_trainer.synchronisers.table import Flag

RECORDED = ["parameters", "app", "torch", "python", "hardware", "world_size", "choice", "compared"]
TAKEN = [*RECORDED, "lr", "help", "rank", "density", "config", "own", "declared", "no_lr"]


@pytest.mark.parametrize("default", [1, True])
@pytest.mark.parametrize("name", [*TAKEN, "batch-size", "my-flag", "no_piece", "piece"])
def test_a_flag_whose_name_is_taken_is_one_line_that_names_it(name: str, default: int) -> None:
    app = replace(streams.APP, flags=(*streams.APP.flags, Flag(name=name, default=default, says="nothing")))
    with pytest.raises(UsageError, match=f"^streams defines a flag '{name}'") as error:
        parse([], app, world_size=None)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("target", ["nowhere:decode", "streams:nothing", "streams:HIDDEN", "", "streams:"])
def test_a_command_that_there_is_not_is_one_line(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(replace(streams.APP, commands={"decode": target}), ["decode"]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("streams decode: error: App.commands names ")
    assert shown.count("\n") == 1


def cycle() -> dict[str, Any]:
    kept: dict[str, Any] = {}
    kept["again"] = kept
    return kept


def metrics(name: str, value: Any = 1.0) -> Callable[..., Any]:
    return lambda task, sums: {"test_loss": 1.0, name: value}


WRONG: dict[str, tuple[str, Callable[..., Any], str]] = {
    "kept set": ("kept", lambda task: {"words": {1}}, r"kept\(\) gives what is not JSON \(.*set"),
    "kept tensor": ("kept", lambda task: {"words": torch.zeros(1)}, r"kept\(\) gives what is not JSON \(.*Tensor"),
    "kept cycle": ("kept", lambda task: cycle(), r"kept\(\) gives what is not JSON"),
    "kept nan": ("kept", lambda task: {"mean": float("nan")}, r"kept\(\) gives what is not JSON"),
    "kept list": ("kept", lambda task: [1], r"kept\(\) gives a list, expected a dict"),
    "metrics tensor": (
        "metrics",
        metrics("wer", torch.zeros(())),
        r"metrics\(\) gives a Tensor for 'wer', expected a num",
    ),
    "metrics list": ("metrics", lambda task, sums: [1.0], r"metrics\(\) gives a list, expected a dict"),
    **{
        f"metrics {name}": ("metrics", metrics(name), rf"metrics\(\) gives '{name}', a name of the trainer's own")
        for name in ("epoch", "steps", "train_loss", "seconds", "data_seconds", "bytes_sent", "algorithm", "world_size")
    },
    "train generator": (
        "train_batches",
        lambda task, **of: iter([1]),
        r"train_batches\(\) gives a list_iterator, expec",
    ),
    "test generator": (
        "test_batches",
        lambda task, **of: iter([1]),
        r"test_batches\(\) gives a list_iterator, expected",
    ),
    **{
        f"weight {value}": (
            "weight",
            lambda task, batch, value=value: value,
            rf"weight\(\) of a batch is {value}, expected",
        )
        for value in (0, -1, float("nan"), 1.5, None)
    },
}


@pytest.mark.parametrize("batch_size", [1, 2])  # of 23 points, of which 2 leave one over
def test_a_batch_that_is_too_small_to_normalise_is_one_line(
    app: App, options: Callable[..., Options], batch_size: int
) -> None:
    with pytest.raises(RunError, match="a batch of 1 has one: give a greater --batch-size"):
        train(app, options(batch_size=batch_size), 1)
    train(app, options(batch_size=3, max_epochs=1, overwrite=True), 1)


@pytest.mark.few(11)
@pytest.mark.parametrize("wrong", WRONG)
def test_what_a_task_gives_that_it_should_not_is_one_line_on_all_ranks(wrong: str, tmp_path: Path) -> None:
    method, given, says = WRONG[wrong]
    task = type("Wrong", (streams.Streams,), {method: given})
    app = replace(streams.APP, build=lambda options, device: task(streams.Net(), options))
    options = parse(f"--batch-size 3 --max-epochs 1 --output {tmp_path / 'run'}".split(), app, world_size=None)

    def body(comm: Any) -> str:
        with pytest.raises(AgreedError, match=says) as error:
            run(app, options, comm)
        return str(error.value)

    first, second = SimulatedWorld(2).run(body)
    assert first == second
