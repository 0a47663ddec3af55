"""An app's own flags, and its commands for what was trained."""

import errno
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import points
import pytest
import streams
import torch
from communicators import Communicator, SimulatedWorld
from hypothesis import settings
from resumed_runs import assert_same_bits, killed_after, train
from thinwire_trainer.app import App
from thinwire_trainer.command import main
from thinwire_trainer.command_line.flags import parse
from thinwire_trainer.command_line.options import Options
from thinwire_trainer.errors import AgreedError, DamagedError, RunError
from thinwire_trainer.records.run_folder import RunFolder
from thinwire_trainer.trained import trained

APP = streams.APP


def asked(*words: str) -> Options:
    return parse([*["--batch-size", "3", "--max-epochs", "1", "--lr", "0.5"], *words], APP, world_size=None)


def test_own_flags_have_defaults_types_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert asked().app == {"piece": 8, "loud": False, "limit": None}
    assert asked("--piece", "5", "--loud", "--limit", "2").app == {"piece": 5, "loud": True, "limit": 2}
    with pytest.raises(RunError, match=r"argument --piece: given '0', expected a whole number from 1 on"):
        asked("--piece", "0")
    with pytest.raises(RunError, match="--piece 13 is unlucky"):
        asked("--piece", "13")
    with pytest.raises(SystemExit):
        asked("--help")
    shown = capsys.readouterr().out
    for expected in "streams's own", "symbols a step (default: 8)", "--no-loud", "python -m streams decode --help":
        assert expected in shown


def test_own_flags_are_recorded_and_read_again(tmp_path: Path) -> None:
    options = asked("--piece", "5", "--loud", "--output", str(tmp_path / "run"))
    train(APP, options, 1)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (config["app"], config["piece"], config["loud"], config["limit"]) == ("streams", 5, True, None)
    again = asked("--config", str(tmp_path / "run" / "config.json"))
    assert again.app == options.app
    wrong = tmp_path / "wrong.json"
    for entry, says in ({"piece": "x"}, "piece"), ({"loud": 1}, "loud is 1, expected true or false"):
        wrong.write_text(json.dumps(entry))
        with pytest.raises(RunError, match=says):
            asked("--config", str(wrong))


def test_a_resumed_run_has_the_own_flags_that_shape_it(tmp_path: Path) -> None:
    flags = ("--lr-schedule", "constant", "--output", str(tmp_path / "run"), "--resume")
    train(APP, asked(*flags[:-1]), 1)
    with pytest.raises(AgreedError, match="--piece 8 then, 9 now"):
        train(APP, asked(*flags, "--piece", "9", "--max-epochs", "2"), 1)
    train(APP, asked(*flags, "--loud", "--max-epochs", "2"), 1)
    new = replace(APP, flags=(*APP.flags, replace(APP.flags[0], name="later", default=3)))
    for value, fits in ("3", True), ("4", False):
        options = parse(
            [*flags, "--batch-size=3", "--lr=0.5", "--max-epochs=3", "--later", value], new, world_size=None
        )
        if fits:
            train(new, options, 1)
        else:
            with pytest.raises(AgreedError, match="--later 3 then, 4 now"):
                train(new, options, 1)


@pytest.mark.parametrize("algorithm", ["dense", "overlap-local-sgd", "eager-majority"])
def test_a_command_has_the_model_of_a_run_that_has_ended(
    tmp_path: Path, algorithm: str, capsys: pytest.CaptureFixture[str]
) -> None:
    train(APP, asked("--algorithm", algorithm, "--output", str(tmp_path / "run")), 3)
    run = trained(APP, tmp_path / "run")
    assert run.options.algorithm == algorithm
    assert run.source.name == "model.pt"
    assert run.kept == {"symbols": ["a", "b", "c", "d"]}
    capsys.readouterr()
    assert main(APP, ["decode", str(tmp_path / "run"), "b"]) == 0
    assert capsys.readouterr().out.strip() in "abcd"
    assert main(APP, ["decode", str(tmp_path / "run"), "z"]) == 2
    assert capsys.readouterr().err.startswith("streams decode: error: argument symbol: invalid choice")


@pytest.mark.parametrize("algorithm", ["dense", "local-sgd", "eager-majority"])
def test_of_a_run_that_was_killed_it_is_the_mean_of_the_ranks_models(tmp_path: Path, algorithm: str) -> None:
    """The one that an evaluation there would see."""
    words = ("--algorithm", algorithm, "--checkpoint-every", "5", "--output", str(tmp_path / "run"))
    assert killed_after(25, APP, asked(*words), 2)
    run = trained(APP, tmp_path / "run")
    assert run.source.parent.name == "checkpoints"
    files = [torch.load(run.source / f"rank{rank}.pt", weights_only=True)["model"] for rank in range(2)]
    for name, value in run.weights.items():
        torch.testing.assert_close(value, (files[0][name] + files[1][name]) / 2)
    different = any(not torch.equal(files[0][name], files[1][name]) for name in files[0])
    assert different == (algorithm == "local-sgd")
    run.into(streams.Net())


def test_a_run_that_goes_on_has_no_model_of_an_earlier_end(tmp_path: Path) -> None:
    options = asked("--lr-schedule", "constant", "--output", str(tmp_path / "run"))
    train(APP, options, 1)
    assert (tmp_path / "run" / "model.pt").exists()
    longer = replace(options, max_epochs=9, resume="latest", checkpoint_every=5)
    assert killed_after(40, APP, longer, 1)
    assert trained(APP, tmp_path / "run").source.parent.name == "checkpoints"


def damage(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[len(content) // 2] ^= 64
        (folder / name).write_bytes(bytes(content))

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda folder: (folder / "config.json").unlink(), "holds no run: give the folder that --output named"),
        (lambda folder: (folder / "config.json").write_text("{"), "is damaged: it holds no settings"),
        (
            lambda folder: (folder / "config.json").write_text('{"app": "cifar"}'),
            "holds a run of cifar, not of streams: python -m cifar",
        ),
        (lambda folder: (folder / "config.json").write_text('{"dnn": "x"}'), "expected one of 'gru'"),
        (damage("task.json"), "task.json is damaged"),
        (lambda folder: (folder / "task.json").unlink(), "task.json is missing, which a command needs besides"),
        (lambda folder: (folder / "model.pt").write_bytes(b"no"), "model.pt is damaged"),
        (lambda folder: torch.save({"a": torch.zeros(2)}, folder / "model.pt"), "does not fit the model"),
        (lambda folder: torch.save([1], folder / "model.pt"), "it holds no state_dict"),
    ],
)
def test_a_folder_that_holds_no_such_run_is_one_line(
    tmp_path: Path, change: Callable[[Path], None], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    train(APP, asked("--output", str(tmp_path / "run")), 1)
    change(tmp_path / "run")
    capsys.readouterr()
    assert main(APP, ["decode", str(tmp_path / "run"), "b"]) == 1
    shown = capsys.readouterr().err
    assert says in shown
    assert shown.startswith("streams decode: error: ")
    assert shown.count("\n") == 1


def test_a_changed_byte_of_the_model_is_found_or_changes_nothing(tmp_path: Path) -> None:
    """Only what no reader looks at, such as the padding between tensors, may change."""
    train(APP, asked("--output", str(tmp_path / "run")), 1)
    path = tmp_path / "run" / "model.pt"
    written, weights = path.read_bytes(), trained(APP, tmp_path / "run").weights
    found, places = 0, range(0, len(written), 60 // settings.default.max_examples)
    for place in places:
        path.write_bytes(written[:place] + bytes([written[place] ^ 64]) + written[place + 1 :])
        try:
            now = trained(APP, tmp_path / "run").weights
        except DamagedError:
            found += 1
        else:
            assert_same_bits(now, weights)
    assert found > len(places) / 4


def test_a_model_that_may_not_be_read_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train(APP, asked("--output", str(tmp_path / "run")), 1)
    real = os.open

    def refusing(path: str, *given: int, **more: int) -> int:  # permissions would not stop root
        if str(path).endswith("model.pt"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, *given, **more)

    monkeypatch.setattr(os, "open", refusing)
    capsys.readouterr()
    assert main(APP, ["decode", str(tmp_path / "run"), "b"]) == 1
    assert capsys.readouterr().err == f"streams decode: error: {tmp_path / 'run' / 'model.pt'}: Permission denied\n"


def test_a_model_is_there_without_what_only_training_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither checkpoints nor the package that wrote its events."""
    train(APP, asked("--checkpoint-every", "0", "--output", str(tmp_path / "run")), 1)
    config = tmp_path / "run" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tensorboard": True}))
    monkeypatch.setattr("thinwire_trainer.command_line.flags.find_spec", lambda name: None)
    assert trained(APP, tmp_path / "run").source.name == "model.pt"


@pytest.mark.parametrize(("teams", "ranks"), [(2, 2), (2, 3), (1, 1)])
def test_a_command_has_the_model_of_elastic_ranks(tmp_path: Path, teams: int, ranks: int) -> None:
    """However many they were when they began."""
    options = parse(["--elastic=here:1", "--algorithm=spardl", f"--teams={teams}"], points.APP, world_size=None)
    folder = RunFolder(tmp_path)
    folder.begin(options.recorded() | {"app": "points", "world_size": ranks}, kept=None, overwrite=False)
    torch.save(torch.nn.Linear(2, 2).state_dict(), folder.model)
    assert trained(points.APP, tmp_path).options.settings() == options.settings()


def test_a_run_without_a_checkpoint_has_no_model_yet(tmp_path: Path) -> None:
    options = asked("--output", str(tmp_path / "run"))

    def build(options: Options, device: torch.device) -> streams.Streams:
        task = streams.build(options, device)
        task.loss = fail  # type: ignore[method-assign]
        return task

    def fail(*given: object) -> torch.Tensor:
        raise KeyboardInterrupt

    def body(comm: Communicator) -> None:
        from thinwire_trainer.run import run

        run(replace(APP, build=build), options, comm)

    with pytest.raises(KeyboardInterrupt):
        SimulatedWorld(1).run(body)
    with pytest.raises(RunError, match="holds no model yet"):
        trained(APP, tmp_path / "run")


def test_a_command_runs_on_one_process(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "2")
    assert main(APP, ["decode", "run", "b"]) == 2
    assert "runs on one process: start it without mpiexec" in capsys.readouterr().err


def test_an_app_may_have_none(app: App) -> None:
    with pytest.raises(RunError, match="unrecognized arguments: decode"):
        parse(["decode"], app, world_size=None)
