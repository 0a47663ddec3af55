"""`--dnn my_package:build`: a model of the user's own, and one clear line for what is wrong with it."""

from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name

import pytest
import torch
from cifar.__main__ import APP
from cifar.classification import build
from cifar.own_model import built
from trainer.command import main
from trainer.command_line.flags import parse
from trainer.errors import RunError
from trainer.launching.placement import LAUNCHERS
from trainer.records.metrics import read_metrics

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


@pytest.mark.parametrize("function", ["build", "any_name", "Class", "Noisy"])
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


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("nothing", "cannot be imported"),
        ("threshold", "is a int, not callable: expected build(*, channels, classes, size)"),
        ("positional", "cannot be called with channels, classes, size (missing a required argument: 'a')"),
        ("wrong_shape", "makes (2, 11) of images (2, 1, 8, 8), expected logits of shape (2, 10)"),
        ("fixed_size", "does not take images (2, 1, 8, 8) (mat1 and mat2 shapes cannot be multiplied"),
        ("two_outputs", "makes tuple of images"),
        ("a_number", "gave a int: expected build("),
        ("picky", "does not fit these images (8 pixels are too few)"),
    ],
)
def test_what_is_wrong_with_it(function: str, says: str, make: Callable[[str], torch.nn.Module]) -> None:
    with pytest.raises(RunError) as error:
        make(function)
    assert f"--dnn my_models_for_tests:{function} " in str(error.value)
    assert says in str(error.value)


def test_a_fault_of_its_author_keeps_its_traceback(make: Callable[[str], torch.nn.Module]) -> None:
    with pytest.raises(NameError, match="undefined_name"):
        make("broken")


def test_a_module_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_models_for_tests.py").write_text("import not_there_at_all\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(RunError, match=r"cannot be imported.*not_there_at_all"):
        built("broken_models_for_tests:build", "broken_models_for_tests:build", None)  # type: ignore[arg-type]


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
