"""The bundled digits, and classification on them."""

from pathlib import Path

import pytest
import torch
from cifar.classification import Classification
from cifar.digits import load
from cifar.images import Images
from cifar.resnet import resnet20


@pytest.fixture(scope="module")
def digits() -> Images:
    return load(Path("unused"))


def test_split(digits: Images) -> None:
    assert (len(digits.train), len(digits.test)) == (1_437, 360)
    assert digits.train.pixels.shape[1:] == (1, 8, 8)
    assert digits.train.pixels.dtype == torch.uint8
    assert int(digits.train.pixels.max()) == 16
    # Every class is in both parts, in like shares.
    for part in (digits.train, digits.test):
        shares = torch.bincount(part.labels, minlength=10) / len(part)
        assert 0.07 < shares.min() <= shares.max() < 0.13


def test_scores_add_up_over_batches(digits: Images) -> None:
    task = Classification(resnet20(channels=1, classes=10).eval(), digits, torch.device("cpu"))
    with torch.no_grad():
        whole = task.score(torch.arange(60))
        parts = task.score(torch.arange(25)) + task.score(torch.arange(25, 60)) + task.score(torch.arange(0))
    assert torch.allclose(whole, parts)
    metrics = task.metrics(whole)
    assert set(metrics) == {"test_loss", "test_accuracy"}
    assert 0 <= metrics["test_accuracy"] <= 1


def test_images_are_normalised_by_the_training_images(digits: Images) -> None:
    seen: list[torch.Tensor] = []

    class Watcher(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(x)
            return torch.zeros(len(x), 10)

    task = Classification(Watcher(), digits, torch.device("cpu"))
    task.loss(torch.arange(task.train_size), torch.Generator())
    assert seen[0].mean().item() == pytest.approx(0, abs=1e-4)
    assert seen[0].std().item() == pytest.approx(1, abs=1e-4)
