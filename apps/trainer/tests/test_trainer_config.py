"""--config: a run's own config.json, or a file like it, in place of flags."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from resumed_runs import assert_same_bits, result, train
from thinwire_trainer.app import App
from thinwire_trainer.command_line.flags import parse
from thinwire_trainer.command_line.options import Options
from thinwire_trainer.errors import RunError
from thinwire_trainer.synchronisers.table import TABLE


def written(tmp_path: Path, entries: object) -> str:
    path = tmp_path / "recipe.json"
    path.write_text(entries if isinstance(entries, str) else json.dumps(entries))
    return f"--config={path}"


@pytest.mark.few(3)
@pytest.mark.parametrize("algorithm", TABLE)
def test_the_config_of_a_run_gives_the_run(
    app: App, options: Callable[..., Options], tmp_path: Path, algorithm: str
) -> None:
    given = options(algorithm=algorithm, lr=0.07, checkpoint_every=2, seed=5, clip_norm=2, keep=3)
    train(app, given, 2)
    again = parse([f"--config={given.output / 'config.json'}", f"--output={tmp_path / 'again'}"], app, world_size=2)
    assert again.settings() == given.settings()
    assert (again.checkpoint_every, again.keep, again.clip_norm) == (2, 3, 2)
    train(app, again, 2)
    assert_same_bits(result(again), result(given))


def test_every_flag_can_be_in_the_file(app: App, tmp_path: Path) -> None:
    entries: dict[str, Any] = {"algorithm": "spardl", "teams": 2, "density": 0.25, "max_epochs": 3, "nworkers": 4}
    entries |= {"milestones": [1, 2], "label_smoothing": 0.1, "warmup_epochs": 1, "tensorboard": False, "amp": True}
    options = parse([written(tmp_path, entries)], app, world_size=None)
    assert {name: options.flags()[name] for name in entries} == entries
    assert options.lr_schedule == "step"
    published = parse([written(tmp_path, {"compression": True, "compressor": "topk"})], app, world_size=None)
    assert published.algorithm == "topk-allgather"


def test_the_command_line_wins(app: App, tmp_path: Path) -> None:
    entries = {"algorithm": "spardl", "teams": 2, "density": 0.25, "lr": 0.3, "nworkers": 4, "nesterov": False}
    entries |= {"lr_schedule": "constant", "amp": True}
    config = written(tmp_path, entries)
    assert parse([config, "--lr", "0.1"], app, world_size=None).lr == 0.1  # also where that is the default
    assert not parse([config, "--no-amp"], app, world_size=None).amp
    assert parse([config, "--nworkers", "2"], app, world_size=None).nworkers == 2
    other = parse([config, "--algorithm", "gtopk"], app, world_size=None)
    assert (other.algorithm, other.own["density"], "teams" in other.own) == ("gtopk", 0.25, False)
    named = parse([config, "--compression", "--compressor", "none"], app, world_size=None)
    assert (named.algorithm, "density" in named.own) == ("dense", False)
    assert parse([config, "--milestones", "5"], app, world_size=None).lr_schedule == "step"
    with pytest.raises(RunError, match="--teams 1 is for spardl"):
        parse([config, "--algorithm", "gtopk", "--teams", "1"], app, world_size=None)


@pytest.mark.few(6)
@pytest.mark.parametrize("then", TABLE)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_what_the_algorithm_of_the_file_has_by_default_is_not_for_another(
    app: App, tmp_path: Path, then: str, optimizer: str
) -> None:
    def asked(*flags: str) -> dict[str, Any]:
        return parse([*flags, "--output=run"], app, world_size=2).flags()

    taking = [name for name, entry in TABLE.items() if optimizer in entry.optimizers]
    if then not in taking:
        return
    chosen = f"--optimizer={optimizer}"
    config = written(tmp_path, parse([f"--algorithm={then}", chosen], app, world_size=2).recorded())
    for now in taking:
        assert asked(config, f"--algorithm={now}") == asked(f"--algorithm={now}", chosen), now
    own = parse([f"--algorithm={then}", chosen, "--momentum=0.6", "--lr=0.2"], app, world_size=2).recorded()
    kept = asked(written(tmp_path, own), "--algorithm=dense")
    assert (kept["momentum"], kept["lr"]) == (0.6, 0.2)


def test_another_optimizer_takes_nothing_of_the_one_in_the_file(app: App, tmp_path: Path) -> None:
    config = written(tmp_path, {"optimizer": "adamw", "lr": 0.002, "momentum": 0.8})
    assert parse([config, "--optimizer=sgd"], app, world_size=2).lr == 0.1
    assert parse([config, "--optimizer=adamw"], app, world_size=2).lr == 0.002


def test_what_describes_the_machine_is_left_to_this_one(app: App, tmp_path: Path) -> None:
    entries = {"output": "/elsewhere", "data_dir": "/there", "device": "cuda", "resume": "latest", "overwrite": True}
    entries |= {
        "oversubscribe": True,
        "backend": "nccl",
        "world_size": 64,
        "hardware": "x",
        "torch": "1",
        "python": "3",
        "parameters": 1,
    }
    options = parse([written(tmp_path, entries)], app, world_size=None)
    assert options.flags() == parse([], app, world_size=None).flags()
    assert parse([written(tmp_path, {"nworkers": 4})], app, world_size=2).nworkers == 2  # as the launcher says


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ({"learning_rate": 0.1}, "no flag is called 'learning_rate'"),
        ({"lr": "0.1"}, 'lr is "0.1"'),
        ({"lr": -1}, "expected a number above 0"),
        ({"lr": True}, "lr is true, expected a value"),
        ({"lr": [0.1]}, "unrecognized|lr is"),
        ({"lr": {"peak": 1}}, "given {"),
        ({"batch_size": 2.5}, "given '2.5'"),
        ({"algorithm": 3}, "invalid choice"),
        ({"algorithm": "sgd"}, "invalid choice"),
        ({"nesterov": "yes"}, 'nesterov is "yes", expected true or false'),
        ({"nesterov": 1}, "expected true or false"),
        ({"milestones": 3}, "milestones is 3"),
        ({"milestones": []}, "given \\[\\]"),
        ({"milestones": ["3"]}, "milestones is"),
        ({"milestones": [3, 2]}, "ascending"),
        ({"teams": 2}, "--teams 2 is for spardl; dense has no teams"),
        ({"lr_schedule": "cosine", "milestones": [1]}, "give one of them"),
        ([1], "holds no settings by name"),
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_a_wrong_entry_is_named(app: App, tmp_path: Path, entries: object, says: str) -> None:
    with pytest.raises(RunError, match=says) as refusal:
        parse([written(tmp_path, entries)], app, world_size=None)
    assert "\n" not in str(refusal.value)
    assert str(refusal.value).count("--help") == 1


def test_a_file_that_is_not_there_is_named(app: App, tmp_path: Path) -> None:
    for path in (tmp_path / "absent.json", tmp_path):
        with pytest.raises(RunError, match=f"--config {path} cannot be read"):
            parse([f"--config={path}"], app, world_size=None)
