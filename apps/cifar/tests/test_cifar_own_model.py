"""`--dnn my_package:build`: a model of the user's own, and one clear line for what is wrong with it."""

from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name

import pytest
import torch
from thinwire_cifar.__main__ import APP
from thinwire_cifar.classification import build
from thinwire_cifar.own_model import built
from thinwire_trainer.command import main
from thinwire_trainer.command_line.flags import parse
from thinwire_trainer.errors import RunError
from thinwire_trainer.launching.placement import LAUNCHERS
from thinwire_trainer.records.metrics import read_metrics

MINE = """
import torch
from torch import nn

threshold = 3


def build(*, channels, classes, size):
    return nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(channels * size * size, classes))


def any_name(**given):
    return build(**given)


def positional(a, b):
    return None


def wrong_shape(*, channels, classes, size):
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * size * size, classes + 1))


def fixed_size(*, channels, classes, size):
    return nn.Sequential(nn.Flatten(), nn.Linear(12345, classes))


def two_outputs(*, channels, classes, size):
    class Two(nn.Module):
        def forward(self, x):
            return x, x
    return Two()


def a_number(*, channels, classes, size):
    return 7


def picky(*, channels, classes, size):
    raise ValueError("8 pixels are too few")


def broken(*, channels, classes, size):
    return undefined_name


def no_key(*, channels, classes, size):
    return {}["width"]


def leaving(*, channels, classes, size):
    raise SystemExit(0)


def leaves_later(*, channels, classes, size):
    return Detaching(channels, classes, size, leave=True)


def empty(*, channels, classes, size):
    return NoParameters(classes)


def frozen(*, channels, classes, size):
    return build(channels=channels, classes=classes, size=size).requires_grad_(False)


def detaching(*, channels, classes, size):
    return Detaching(channels, classes, size)


def complex_numbers(*, channels, classes, size):
    model = build(channels=channels, classes=classes, size=size)
    model.phase = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    return model


def whole_numbers(*, channels, classes, size):
    return nn.Sequential(build(channels=channels, classes=classes, size=size), Rounded())


class Rounded(nn.Module):
    def forward(self, x):
        return x.long()


class NoParameters(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.classes = classes

    def forward(self, x):
        return x.flatten(1)[:, :self.classes]


class Detaching(nn.Module):
    def __init__(self, channels, classes, size, leave=False):
        super().__init__()
        self.inner = build(channels=channels, classes=classes, size=size)
        self.leave = leave

    def forward(self, x):
        if self.leave:
            raise SystemExit(0)
        return self.inner(x).detach()


class Normed(nn.Module):
    def __init__(self, *, channels, classes, size):
        super().__init__()
        self.inner = nn.Sequential(nn.BatchNorm2d(channels), build(channels=channels, classes=classes, size=size))

    def forward(self, x):
        return self.inner(x)


class Noisy(nn.Module):
    def __init__(self, *, channels, classes, size):
        super().__init__()
        self.inner = build(channels=channels, classes=classes, size=size)

    def forward(self, x):
        return self.inner(x + torch.rand(()))


class Class(nn.Module):
    def __init__(self, *, channels, classes, size):
        super().__init__()
        self.inner = build(channels=channels, classes=classes, size=size)

    def forward(self, x):
        return self.inner(x)
"""


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], torch.nn.Module]:
    (tmp_path / "my_models_for_tests.py").write_text(MINE)
    monkeypatch.syspath_prepend(str(tmp_path))
    for variables in LAUNCHERS.values():
        for variable in variables:
            monkeypatch.delenv(variable, raising=False)

    def built(function: str) -> torch.nn.Module:
        options = parse(["--dnn", f"my_models_for_tests:{function}"], APP, world_size=None)
        return build(options, torch.device("cpu")).model

    return built


@pytest.mark.parametrize("function", ["build", "any_name", "Class", "Noisy", "Normed"])
def test_a_model_of_ones_own(function: str, make: Callable[[str], torch.nn.Module]) -> None:
    """The one that the function makes, and random numbers after it as if nobody had looked at it."""
    torch.manual_seed(0)
    model = make(function)
    after = torch.rand(1)
    torch.manual_seed(0)
    again = resolve_name(f"my_models_for_tests:{function}")(channels=1, classes=10, size=8)
    assert torch.equal(after, torch.rand(1))
    assert model.training
    assert model(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), again.parameters(), strict=True))


def test_looking_at_it_leaves_its_statistics(make: Callable[[str], torch.nn.Module]) -> None:
    model = make("Normed")
    fresh = torch.nn.BatchNorm2d(1)
    assert all(torch.equal(*pair) for pair in zip(model.buffers(), fresh.buffers(), strict=True))


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("nothing", "cannot be imported"),
        ("threshold", "is a int, not callable: expected build(*, channels, classes, size)"),
        ("positional", "cannot be called with channels, classes, size (missing a required argument: 'a')"),
        ("wrong_shape", "makes (2, 11) of images (2, 1, 8, 8), expected logits of shape (2, 10)"),
        ("fixed_size", "does not take images (2, 1, 8, 8) (RuntimeError: "),
        ("two_outputs", "makes tuple of images"),
        ("a_number", "gave a int: expected build("),
        ("picky", "does not fit these images (8 pixels are too few)"),
        ("broken", "failed where it builds the model (NameError: name 'undefined_name' is not defined), in my_models_"),
        ("no_key", "failed where it builds the model (KeyError: 'width'), in my_models_for_tests.py, line "),
        ("leaving", "failed where it builds the model: it called sys.exit, in my_models_for_tests.py, line "),
        ("leaves_later", "does not take images (2, 1, 8, 8): it called sys.exit"),
        ("empty", "has no parameter that requires a gradient: there is nothing to train"),
        ("frozen", "has no parameter that requires a gradient: there is nothing to train"),
        ("detaching", "makes logits that no parameter has a gradient of"),
        ("complex_numbers", "has complex parameters (phase), expected real ones"),
        ("whole_numbers", "makes torch.int64 of images, expected logits"),
    ],
)
def test_what_is_wrong_with_it(function: str, says: str, make: Callable[[str], torch.nn.Module]) -> None:
    with pytest.raises(RunError) as error:
        make(function)
    assert f"--dnn my_models_for_tests:{function} " in str(error.value)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("module", "says"),
    [
        ("import not_there_at_all", r"cannot be imported.*not_there_at_all"),
        ("def build(:", r"cannot be imported \(SyntaxError: "),
        ("{}['width']", r"cannot be imported \(KeyError: 'width'\), in broken_models_for_tests.py, line 1"),
        ("import sys; sys.exit(0)", r"cannot be imported: it called sys.exit, in broken_models_for_tests.py, line 1"),
    ],
)
def test_a_module_that_cannot_be_imported(
    module: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "broken_models_for_tests"
    (tmp_path / f"{name}.py").write_text(f"{module}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(RunError, match=says):
        built(f"{name}:build", f"{name}:build", None)  # type: ignore[arg-type]


def test_one_that_calls_sys_exit_fails(
    make: Callable[[str], torch.nn.Module], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    del make
    argv = ["--dnn", "my_models_for_tests:leaving", "--output", str(tmp_path / "run")]
    assert main(APP, argv) == 1
    assert capfd.readouterr().err.count("\n") == 1


def test_it_trains_and_names_its_folder(
    make: Callable[[str], torch.nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert (
        main(APP, ["--dnn", "my_models_for_tests:Class", "--max-epochs", "1", "--batch-size", "256", "--lr", "0.01"])
        == 0
    )
    folder = tmp_path / "runs" / "cifar-my_models_for_tests.Class-digits-dense"
    assert len(read_metrics(folder / "metrics.jsonl")) == 1
