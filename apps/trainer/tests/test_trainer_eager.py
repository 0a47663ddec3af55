"""Eager SGD in the loop: meetings, what resumes, whose lateness is told, and how it ends."""

import itertools
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from communicators import CollectiveError, SimulatedWorld, as_communicator
from resumed_runs import assert_same_bits, killed_after, result, train
from thinwire_trainer.app import App
from thinwire_trainer.command_line.flags import parse
from thinwire_trainer.command_line.options import Options
from thinwire_trainer.errors import AgreedError, UsageError
from thinwire_trainer.records.metrics import read_metrics
from thinwire_trainer.synchronisers import eager
from thinwire_trainer.synchronisers.table import TABLE

NAMES = ["eager-solo", "eager-majority", "eager-quorum"]


@pytest.mark.few(5)
@pytest.mark.parametrize("algorithm", NAMES)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_gradient_of_an_epoch_is_in_its_rounds_and_the_rate_ends_with_the_run(
    app: App, options: Callable[..., Options], algorithm: str, size: int
) -> None:
    given = options(algorithm=algorithm, max_epochs=3, lr_schedule="step", inject_delay="linear=0.01")
    train(app, given, size)
    rows, _, states = result(given)
    assert [row["epoch"] for row in rows] == [1, 2, 3]
    steps = rows[-1]["steps"]
    for state in states:
        own = state["optimizer"]["distributed"]
        assert (own["gradients"], own["scheduler"]["last_epoch"]) == (size * steps, steps)
        assert state["optimizer"]["param_groups"][0]["lr"] == pytest.approx(0.05 * 0.01)
        for name, value in state["model"].items():
            if "running" not in name and "tracked" not in name:
                assert torch.equal(value, states[0]["model"][name])


@pytest.mark.few(2)
@pytest.mark.parametrize("algorithm", NAMES)
@pytest.mark.parametrize("operations", [12, 19, 24])
def test_killed_anywhere_and_resumed(
    app: App, options: Callable[..., Options], tmp_path: Path, algorithm: str, operations: int
) -> None:
    """Where all ranks are alike arrivals repeat themselves, so the whole run does; meetings before checkpoints too."""
    straight = options(algorithm=algorithm, output=tmp_path / "straight", momentum=0.9, checkpoint_every=2)
    train(app, straight, 3)
    broken = replace(straight, output=tmp_path / "broken")
    assert killed_after(operations, app, broken, 3)
    train(app, replace(broken, resume="latest"), 3)
    assert_same_bits(result(broken), result(straight))


def test_a_finished_run_goes_on_with_more_epochs(app: App, options: Callable[..., Options]) -> None:
    flags = {"algorithm": "eager-majority", "lr_schedule": "constant"}
    train(app, options(**flags, max_epochs=1), 3)
    longer = options(**flags, max_epochs=3, resume=True)
    train(app, longer, 3)
    assert [row["epoch"] for row in read_metrics(longer.output / "metrics.jsonl")] == [1, 2, 3]


def test_who_is_late_is_told(app: App, options: Callable[..., Options], capsys: pytest.CaptureFixture[str]) -> None:
    given = options(algorithm="eager-quorum", nworkers=3, quorum=3, inject_delay="fixed:1=0.2")
    train(app, given, 3)
    shown = capsys.readouterr().out
    assert re.search(r"4 rounds in 4 steps; rank 1 was last in 100 % of rounds, by (199|200) ms in the median\n", shown)
    row = read_metrics(given.output / "metrics.jsonl")[-1]
    assert (row["last_rank"], row["last_share"]) == (1, 1.0)
    assert row["late_seconds"] == pytest.approx(0.2, abs=0.01)


@pytest.mark.parametrize("algorithm", ["dense", "eager-solo"])
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("random:9=0.2", "at most 1 ranks"),
        ("fixed:0,7=0.2", "but ranks are 0 … 0"),
    ],
)
def test_delays_that_are_none_are_the_users_to_mend(app: App, algorithm: str, text: str, says: str) -> None:
    """Alike on all ranks, before the first step."""
    options = parse(["--algorithm", algorithm, "--inject-delay", text], app, world_size=None)
    with pytest.raises(AgreedError, match=f"--inject-delay: .*{says}"):
        TABLE[algorithm].make(options, torch.nn.Linear(9, 7), as_communicator(None), steady)


@pytest.mark.parametrize("text", ["sometimes", "fixed:1=nan", "fixed:=1", "linear=-1", "linear=1e", "random:two=1", ""])
def test_what_is_no_delay_is_told_before_anything_begins(app: App, text: str) -> None:
    with pytest.raises(UsageError, match=r"--inject-delay: given .*, expected"):
        parse(["--algorithm", "dense", "--inject-delay", text], app, world_size=None)


@pytest.mark.parametrize(
    ("algorithm", "alpha", "says"),
    [
        ("easgd", "1", "0 < alpha < 0.5 with 3 workers"),
        ("slowmo", "0", "a number above 0"),
        ("streaming-diloco", "1", "takes 0 <= alpha < 1"),
    ],
)
def test_how_far_ranks_pull_is_checked_before_anything_begins(app: App, algorithm: str, alpha: str, says: str) -> None:
    with pytest.raises(UsageError, match=f"--alpha {alpha}.* {says}"):
        parse(["--algorithm", algorithm, "--alpha", alpha, "--nworkers", "3"], app, world_size=None)


def steady(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)


@pytest.mark.parametrize("algorithm", NAMES)
def test_own_flags_reach_the_optimizer(app: App, algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    real = eager.EagerSGD
    monkeypatch.setattr(eager, "EagerSGD", lambda *given, **named: asked.append(named) or real(*given, **named))
    own = ["--quorum", "1"] if algorithm == "eager-quorum" else []
    argv = ["--algorithm", algorithm, *own, "--grace", "0.5x", "--max-staleness", "3", "--seed", "5"]
    made = TABLE[algorithm].make(
        parse(argv, app, world_size=None), torch.nn.Linear(9, 7), as_communicator(None), steady
    )
    made.finish()
    made.close()
    [named] = asked
    expected = {
        "quorum": 1 if own else algorithm.removeprefix("eager-"),
        "grace": "0.5x",
        "max_staleness": 3,
        "seed": 5,
    }
    assert {name: named[name] for name in expected} == expected


def test_after_an_error_on_one_rank_nobody_waits_and_no_thread_is_left(
    app: App, options: Callable[..., Options]
) -> None:
    def build(options: Options, device: torch.device) -> Any:
        task = app.build(options, device)
        loss = task.loss

        def breaks(indices: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
            if next(calls) == 7:  # one rank's third
                raise ZeroDivisionError("ours")
            return loss(indices, generator)

        task.loss = breaks
        return task

    calls = itertools.count()
    before = threading.active_count()
    with pytest.raises((ZeroDivisionError, CollectiveError), match="ours"):
        train(replace(app, build=build), options(algorithm="eager-solo"), 3)
    assert threading.active_count() == before
    assert SimulatedWorld(2).run(lambda comm: comm.rank) == [0, 1]


def test_a_load_that_fails_on_one_rank_is_told_on_all(
    app: App, options: Callable[..., Options], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = options(algorithm="eager-majority")
    train(app, given, 2)
    real, loads = eager.Eager.load_state_dict, itertools.count()

    def load(synchroniser: eager.Eager, state: dict[str, Any]) -> None:
        real(synchroniser, state)
        if next(loads) == 0:
            raise TypeError("what nobody foresaw")

    monkeypatch.setattr(eager.Eager, "load_state_dict", load)
    with pytest.raises(AgreedError, match=r"does not fit this run .TypeError: what nobody foresaw"):
        train(app, replace(given, resume="latest"), 2)
