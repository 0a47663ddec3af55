"""--algorithm auto: chosen once, the same on all ranks, and kept by the run."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from communicators import Communicator, Link, SimulatedWorld
from resumed_runs import Killed, assert_same_bits, killed_after, result, train
from sparse_collectives import ALGORITHMS
from sparse_collectives.prediction.cost import Handling
from thinwire_trainer.app import App
from thinwire_trainer.command_line.flags import parse
from thinwire_trainer.command_line.options import Options
from thinwire_trainer.errors import AgreedError, RunError
from thinwire_trainer.launching.device import own_device
from thinwire_trainer.records.metrics import read_metrics
from thinwire_trainer.records.run_folder import RunFolder
from thinwire_trainer.run import run

SLOW, FAST = Link(1e-6, 1e-5), Link(1e-6, 1e-12)
MEASURING = "sparse_collectives.prediction.auto.measure_handling"


@pytest.fixture
def working(monkeypatch: pytest.MonkeyPatch) -> None:
    """Selecting takes time, which a simulated clock does not see."""
    monkeypatch.setattr(MEASURING, lambda *given, **named: Handling(compress=1e-6))


@pytest.fixture
def asked(options: Callable[..., Options], tmp_path: Path) -> Options:
    return options(algorithm="auto", momentum=0.9, weight_decay=0.01, output=tmp_path / "auto")


def train_over(link: Link, app: App, options: Options, ranks: int) -> None:
    SimulatedWorld(ranks, link=link).run(lambda comm: run(app, options, comm, device=own_device(comm.rank, "cpu")))


def config(options: Options) -> dict[str, Any]:
    return RunFolder(options.output).recorded()


@pytest.mark.few(3)
@pytest.mark.usefixtures("working")
@pytest.mark.parametrize(("link", "compresses"), [(SLOW, True), (FAST, False)])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_link_decides_and_the_run_is_one_of_what_was_chosen(
    app: App,
    asked: Options,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    link: Link,
    compresses: bool,
    ranks: int,
) -> None:
    """The same bits as with the algorithm by name: so momentum has its place, too."""
    train_over(link, app, asked, ranks)
    name = config(asked)["algorithm"]
    assert ALGORITHMS[name].selects == compresses
    assert {row["algorithm"] for row in read_metrics(asked.output / "metrics.jsonl")} == {name}
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("auto: ")]
    assert line == config(asked)["choice"]
    assert line.startswith(f"auto: {name}")
    assert ("; dense " in line) == compresses
    given = [f"--config={asked.output / 'config.json'}", f"--output={tmp_path / 'named'}"]
    named = parse(given, app, world_size=ranks)
    assert named.algorithm == name
    given_again, first = named.flags(), asked.flags()
    changed = {flag for flag in given_again.keys() & first.keys() if given_again[flag] != first[flag]}
    assert changed == {"algorithm", "output", "nworkers"}
    train(app, named, ranks)
    assert_same_bits(result(named), result(asked))


@pytest.mark.usefixtures("working")
@pytest.mark.parametrize(("said", "momenta"), [({}, (0.5, 0.9)), ({"momentum": 0.7}, (0.7, 0.7))])
def test_adamw_has_the_momentum_of_what_was_chosen(
    app: App, options: Callable[..., Options], tmp_path: Path, said: dict[str, float], momenta: tuple[float, float]
) -> None:
    """β₁ as with the algorithm by name, unless it is given; also when the run is gone on with."""
    for link, momentum in zip((SLOW, FAST), momenta, strict=True):
        given = options(algorithm="auto", optimizer="adamw", output=tmp_path / str(momentum), overwrite=True, **said)
        train_over(link, app, given, 3)
        assert config(given)["momentum"] == momentum
        train_over(link, app, replace(given, overwrite=False, resume="latest"), 3)


@pytest.mark.usefixtures("working")
def test_a_run_keeps_the_momentum_that_it_was_trained_with(
    app: App, options: Callable[..., Options], tmp_path: Path
) -> None:
    begun = options(algorithm="auto", optimizer="adamw", momentum=0.5, output=tmp_path / "run")
    train_over(FAST, app, begun, 3)
    again = options(algorithm="auto", optimizer="adamw", output=tmp_path / "run", resume="latest")
    train_over(FAST, app, again, 3)
    assert (config(again)["algorithm"], config(again)["momentum"]) == ("dense", 0.5)


def test_alone_there_is_nothing_to_exchange(app: App, asked: Options) -> None:
    train(app, asked, 1)
    assert config(asked)["algorithm"] == "dense"


@pytest.mark.few(2)
@pytest.mark.usefixtures("working")
@pytest.mark.parametrize(("then", "now"), [(SLOW, FAST), (FAST, SLOW)])
@pytest.mark.parametrize("operations", [4, 30])
def test_a_run_that_is_gone_on_with_keeps_its_choice_and_measures_nothing(
    app: App, asked: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: Link, now: Link, operations: int
) -> None:
    """Also before there is a checkpoint."""
    train_over(then, app, asked, 3)
    broken = replace(asked, output=tmp_path / "broken", checkpoint_every=1)
    monkeypatch.setattr("resumed_runs.train", lambda *given: train_over(then, *given))
    assert killed_after(operations, app, broken, 3)
    assert config(broken)["choice"] == config(asked)["choice"]
    assert bool(RunFolder(broken.output).checkpoints.complete()) == (operations == 30)

    def measured(*given: object, **named: object) -> None:
        raise Killed("measured again")

    monkeypatch.setattr("thinwire_trainer.synchronisers.automatic.choose", measured)
    read, real = [], RunFolder.recorded
    monkeypatch.setattr(RunFolder, "recorded", lambda folder: read.append(folder) or real(folder))
    train_over(now, app, replace(broken, resume="latest"), 3)
    assert len(read) == (2 if operations == 4 else 1), "by rank 0: other machines may not see it yet"
    assert_same_bits(result(broken), result(asked))
    assert config(broken)["choice"] == config(asked)["choice"]


@pytest.mark.usefixtures("working")
def test_ranks_need_not_measure_the_same(app: App, asked: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(comm: Communicator, **named: object) -> Handling:
        return Handling(compress=1e-5 * comm.rank**4)

    monkeypatch.setattr(MEASURING, measured)
    train_over(FAST, app, asked, 4)
    assert config(asked)["algorithm"] == "dense"


def test_flags_of_all_that_may_be_chosen_are_taken(app: App, options: Callable[..., Options]) -> None:
    given = options(algorithm="auto", density=0.5, wire="bf16", nonfinite="skip", overlap=True)
    train_over(SLOW, app, given, 2)
    found = config(given)
    assert (found["wire"], found["nonfinite"], found["overlap"]) == ("bf16", "skip", True)
    assert found.get("density", 0.5) == 0.5
    changed = replace(given, own={**given.own, "nonfinite": "raise"}, resume="latest")
    with pytest.raises(AgreedError, match="--nonfinite skip then, raise now"):
        train_over(SLOW, app, changed, 2)


@pytest.mark.usefixtures("working")
def test_whole_gradients_do_not_take_every_wire(app: App, options: Callable[..., Options]) -> None:
    for wire, taken in (("int8", "fp32"), ("bf16", "bf16")):
        given = options(algorithm="auto", wire=wire, max_epochs=1, overwrite=True)
        train_over(FAST, app, given, 2)
        assert (config(given)["algorithm"], config(given)["wire"]) == ("dense", taken)
        train_over(FAST, app, replace(given, resume="latest", overwrite=False), 2)


def test_the_default_folder_is_autos(app: App) -> None:
    options = parse(["--algorithm", "auto"], app, world_size=None)
    assert options.output == Path("runs/points-plain-points-auto")
    assert set(options.own) == {"density", "density_warmup", "wire", "nonfinite", "verify"}


def test_a_recipe_may_leave_it_to_the_ranks(app: App, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.json"
    recipe.write_text(json.dumps({"algorithm": "auto", "density": 0.125}))
    options = parse([f"--config={recipe}"], app, world_size=None)
    assert (options.algorithm, options.own["density"]) == ("auto", 0.125)
    other = parse([f"--config={recipe}", "--algorithm=dense"], app, world_size=None)
    assert "density" not in other.own


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--teams 2", "auto has no teams"),
        ("--select dgc", "auto has no select"),
        ("--nesterov", "auto may choose what has its own before the selection"),
        ("--compression", "differ"),
    ],
)
def test_what_depends_on_the_choice_is_refused(app: App, flags: str, says: str) -> None:
    with pytest.raises(RunError, match=says):
        parse(["--algorithm", "auto", *flags.split()], app, world_size=None)


def test_only_a_run_that_was_chosen_for_is_gone_on_with(app: App, options: Callable[..., Options]) -> None:
    auto = options(algorithm="auto", resume="latest")
    with pytest.raises(AgreedError, match=r"holds no run to resume"):
        train(app, auto, 2)
    train(app, options(), 2)
    with pytest.raises(AgreedError, match=r"was not made with it: give --algorithm dense"):
        train(app, auto, 2)
    train_over(SLOW, app, replace(auto, resume=None, overwrite=True), 2)
    by_name = options(algorithm=config(auto)["algorithm"], resume="latest")
    train(app, by_name, 2)


@pytest.mark.few(4)
@pytest.mark.usefixtures("working")
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("{", "config.json is damaged"),
        ("[1]", "config.json is damaged"),
        ({"algorithm": "sgd"}, "says sgd, which is no --algorithm"),
        ({"algorithm": [1]}, "which is no --algorithm"),
        ({"algorithm": None}, "which is no --algorithm"),
        ({"wire": "int3"}, "config.json is damaged: wire is int3"),
        ({"wire": "bf16"}, "--wire fp32 then, bf16 now"),
        ({"algorithm": "spardl", "teams": "many"}, "config.json is damaged: teams"),
        ({"algorithm": "spardl", "teams": 3}, "--teams 3 does not divide the 2 workers"),
    ],
)
def test_a_damaged_record_is_named(app: App, asked: Options, change: str | dict[str, Any], says: str) -> None:
    train_over(SLOW, app, asked, 2)
    path = RunFolder(asked.output).config
    path.write_text(change if isinstance(change, str) else json.dumps(json.loads(path.read_text()) | change))
    before = torch.load(asked.output / "model.pt", weights_only=True)
    with pytest.raises(AgreedError, match=says):
        train_over(SLOW, app, replace(asked, resume="latest"), 2)
    assert_same_bits(torch.load(asked.output / "model.pt", weights_only=True), before)
