"""--optimizer adamw and muon: with every algorithm, its own defaults, and what does not go with it."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from resumed_runs import assert_same_bits, killed_after, result, train
from thinwire_trainer.app import App
from thinwire_trainer.command_line.flags import parse
from thinwire_trainer.command_line.options import Options
from thinwire_trainer.errors import AgreedError, RunError
from thinwire_trainer.records.metrics import read_metrics
from thinwire_trainer.synchronisers.synchroniser import adamw, inner_optimizer
from thinwire_trainer.synchronisers.table import TABLE, Flag, Synchronisation

WITH_ADAMW = [name for name, entry in TABLE.items() if "adamw" in entry.optimizers]
needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon came with torch 2.9")


@pytest.mark.few(2)
@pytest.mark.parametrize("algorithm", WITH_ADAMW)
def test_with_adamw_every_algorithm_is_killed_anywhere_and_resumed(
    app: App, options: Callable[..., Options], tmp_path: Path, algorithm: str
) -> None:
    flags = {"algorithm": algorithm, "optimizer": "adamw", "weight_decay": 0.1, "lr": 0.01}
    straight = options(output=tmp_path / "straight", checkpoint_every=1, **flags)  # for eager ranks each is a meeting
    train(app, straight, 2)
    broken = replace(straight, output=tmp_path / "broken")
    assert killed_after(20, app, broken, 2)
    other = parse_again(broken, app, "--optimizer", "sgd")
    with pytest.raises(AgreedError, match="--optimizer adamw then, sgd now"):
        train(app, replace(other, resume="latest"), 2)
    train(app, replace(broken, resume="latest"), 2)
    assert_same_bits(result(broken), result(straight))


@pytest.mark.parametrize(("algorithm", "own"), [("dense", {}), ("diloco", {"sync_every": 3, "compress": "int2"})])
@needs_muon
def test_with_muon_it_is_killed_anywhere_and_resumed(
    app: App, options: Callable[..., Options], tmp_path: Path, algorithm: str, own: dict[str, Any]
) -> None:
    """DiLoCo with Muon inside and two bits is MuLoCo."""
    straight = options(output=tmp_path / "straight", algorithm=algorithm, optimizer="muon", lr=0.01, **own)
    train(app, straight, 2)
    broken = replace(straight, output=tmp_path / "broken", checkpoint_every=1)
    assert killed_after(20, app, broken, 2)
    train(app, replace(broken, resume="latest"), 2)
    assert_same_bits(result(broken), result(straight))
    groups = result(straight)[2][0]["optimizer"]["param_groups"]
    assert [("ns_steps" in group, "betas" in group) for group in groups] == [(True, False), (False, True)]


@needs_muon
def test_a_model_without_hidden_matrices_is_told_of_muon(app: App) -> None:
    given = parse(["--optimizer", "muon"], app, world_size=None)
    with pytest.raises(AgreedError, match="--optimizer muon: the model has no hidden matrix"):
        inner_optimizer(given, torch.nn.Linear(2, 2))


def parse_again(then: Options, app: App, *words: str) -> Options:
    """Options like these, but for some words."""
    now = parse(["--algorithm", then.algorithm, *words], app, world_size=None)
    return replace(then, optimizer=now.optimizer)


@pytest.mark.parametrize("algorithm", WITH_ADAMW)
def test_adamw_on_one_rank_is_adamw(
    app: App, options: Callable[..., Options], tmp_path: Path, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every algorithm makes one, of the run's rate, momentum and decay, and takes its steps."""
    made, steps = [], []
    inner = torch.optim.AdamW

    class Noted(inner):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **settings: Any) -> None:
            made.append(settings)
            super().__init__(*args, **settings)

        def step(self, *args: Any) -> Any:
            steps.append(1)
            return super().step(*args)

    monkeypatch.setattr("thinwire_trainer.synchronisers.synchroniser.AdamW", Noted)
    flags = {"algorithm": algorithm, "optimizer": "adamw", "weight_decay": 0.1, "lr": 0.01, "max_epochs": 1}
    train(app, options(output=tmp_path / "run", momentum=0.7, **flags), 1)
    assert made == [{"lr": 0.01, "betas": (0.7, 0.999), "weight_decay": 0.1}]
    assert steps


def test_what_waits_of_adamw_counts_where_gradients_are_made(
    app: App, options: Callable[..., Options], tmp_path: Path
) -> None:
    """One rank at a density of 5 % has the training losses of AdamW itself, within rounding."""
    flags = {"optimizer": "adamw", "momentum": 0.8, "weight_decay": 0.1, "lr": 0.01, "max_epochs": 2}
    losses = []
    for algorithm, own in (("dense", {}), ("gtopk", {"density": 0.05})):
        given = options(algorithm=algorithm, output=tmp_path / algorithm, **flags, **own)
        train(app, given, 1)
        losses.append([row["train_loss"] for row in read_metrics(given.output / "metrics.jsonl")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--nesterov", "--nesterov is a form of SGD's momentum: AdamW has none"),
        ("--algorithm gtopk --overlap", "--overlap sends gradients during backward, and with --optimizer adamw gtopk"),
        ("--algorithm auto --overlap", "--overlap sends gradients during backward, and with --optimizer adamw auto"),
        ("--algorithm own", "--optimizer adamw is not for own, which takes sgd"),
        ("--optimizer muon --algorithm gtopk", "--optimizer muon is not for gtopk, which takes sgd, adamw"),
    ],
)
def test_what_does_not_go_with_adamw_is_refused(app: App, words: str, says: str) -> None:
    def make(*given: Any) -> Any:
        raise AssertionError

    app = replace(
        app, synchronisations={"own": Synchronisation(make=make, flags=(Flag(name="strength", default=1, says=""),))}
    )
    with pytest.raises(RunError, match=says):
        parse(["--optimizer", "adamw", *words.split()], app, world_size=None)


def test_each_optimizer_has_its_own_defaults_also_beside_an_apps(app: App) -> None:
    app = replace(app, defaults={**app.defaults, "lr": 4.0})
    sgd, adamw, given = (
        parse(words.split(), app, world_size=None)
        for words in ("", "--optimizer adamw", "--optimizer adamw --lr 0.1 --momentum 0.7")
    )
    assert (sgd.optimizer, sgd.lr, sgd.momentum) == ("sgd", 4.0, 0.9)
    assert (adamw.optimizer, adamw.lr, adamw.momentum) == ("adamw", 0.001, 0.9)
    assert (given.lr, given.momentum) == (0.1, 0.7)
    muon = parse(["--optimizer", "muon"], app, world_size=None)
    assert (muon.lr, muon.momentum) == (0.001, 0.95)


@pytest.mark.parametrize("algorithm", TABLE)
def test_momentum_is_adamws_first_beta_and_less_where_updates_wait(app: App, algorithm: str) -> None:
    entry = TABLE[algorithm]
    if "adamw" not in entry.optimizers:
        with pytest.raises(RunError, match="adamw is not for"):
            parse(["--optimizer", "adamw", "--algorithm", algorithm], app, world_size=None)
        return
    given = parse(["--optimizer", "adamw", "--algorithm", algorithm], app, world_size=None)
    assert given.momentum == (0.9 if entry.nesterov and not algorithm.startswith("eager") else 0.5)
    for momentum in (given.momentum, 0.7):
        inner = adamw(replace(given, momentum=momentum), torch.nn.Linear(2, 2))
        assert inner.param_groups[0]["betas"] == (momentum, 0.999)


def test_a_recorded_run_of_adamw_is_done_again_and_one_of_sgd_lends_it_no_rate(app: App, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"optimizer": "adamw", "lr": 0.02, "momentum": 0.8, "nesterov": False}))
    again = parse(["--config", str(file)], app, world_size=None)
    assert (again.optimizer, again.lr, again.momentum) == ("adamw", 0.02, 0.8)
    for recorded in ({"optimizer": "sgd"}, {}):  # the latter is a run from before there was a choice
        file.write_text(json.dumps({"lr": 3.0, "momentum": 0.9, "nesterov": True, "batch_size": 7, **recorded}))
        other = parse(["--config", str(file), "--optimizer", "adamw"], app, world_size=None)
        assert (other.lr, other.momentum, other.nesterov, other.batch_size) == (0.001, 0.9, False, 7)


@pytest.mark.parametrize("algorithm", [name for name in WITH_ADAMW if not TABLE[name].nesterov])
def test_where_few_are_selected_every_rank_has_moments_of_its_own(
    app: App, options: Callable[..., Options], tmp_path: Path, algorithm: str
) -> None:
    """Those of its own gradients; of a mean that had been exchanged they would be the same on all ranks."""
    train(app, options(output=tmp_path / "run", algorithm=algorithm, optimizer="adamw", lr=0.01), 2)
    one, other = (moments(state["optimizer"]["state"]) for state in result(options())[2])
    assert not torch.equal(one, other)


def moments(state: dict[int, dict[str, torch.Tensor]]) -> torch.Tensor:
    return torch.cat([kept["exp_avg"].flatten() for kept in state.values()])


@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_selected_updates_learn_as_whole_ones_where_all_is_sent(
    app: App, options: Callable[..., Options], tmp_path: Path, nonfinite: str
) -> None:
    """Of one rank, at density 1: AdamW within rounding."""
    models = []
    for algorithm, own in (("dense", {}), ("gtopk", {"density": 1.0})):
        flags = {
            "algorithm": algorithm,
            "optimizer": "adamw",
            "momentum": 0.8,
            "weight_decay": 0.1,
            "lr": 0.01,
            "nonfinite": nonfinite,
        }
        given = options(output=tmp_path / algorithm, **flags, **own)
        train(app, given, 1)
        models.append(result(given)[1])
    for name, value in models[0].items():
        torch.testing.assert_close(models[1][name], value)
