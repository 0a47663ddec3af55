"""The bundled digits, and classification on them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from thinwire_cifar.classification import Classification
from thinwire_cifar.data.digits import load
from thinwire_cifar.data.images import Images
from thinwire_cifar.models.resnet_cifar import resnet20


@pytest.fixture(scope="module")
def digits() -> Images:
    return load(Path("unused"))


def test_split(digits: Images) -> None:
    assert (len(digits.train.labels), len(digits.test.labels)) == (1_437, 360)
    pixels = digits.train.read(torch.arange(1_437), None)
    assert pixels.shape[1:] == (digits.channels, digits.size, digits.size) == (1, 8, 8)
    assert pixels.dtype == torch.uint8
    assert int(pixels.max()) == 16
    # Every class is in both parts, in like shares.
    for part in (digits.train, digits.test):
        shares = torch.bincount(part.labels, minlength=10) / len(part.labels)
        assert 0.07 < shares.min() <= shares.max() < 0.13


def test_they_are_scikit_learns(digits: Images) -> None:
    """The multiset of (image, class), since the split is drawn."""
    from sklearn.datasets import load_digits  # two seconds, of whoever collects tests

    bundled = load_digits()
    expected = np.column_stack([bundled.data, bundled.target])
    ours = [
        np.column_stack([part.read(torch.arange(count), None).flatten(1), part.labels])
        for part, count in ((digits.train, 1_437), (digits.test, 360))
    ]
    assert sorted(map(tuple, np.concatenate(ours).tolist())) == sorted(map(tuple, expected.tolist()))


def test_scores_add_up_over_batches(digits: Images) -> None:
    task = Classification(resnet20(channels=1, classes=10, size=8).eval(), digits, torch.device("cpu"))
    with torch.no_grad():
        whole = task.score(task.read_test(torch.arange(60)))
        ranges = (torch.arange(25), torch.arange(25, 60), torch.arange(0))
        parts = torch.stack([task.score(task.read_test(some)) for some in ranges]).sum(0)
    assert torch.allclose(whole, parts)
    metrics = task.metrics(whole)
    assert set(metrics) == {"test_loss", "test_accuracy"}
    assert 0 <= metrics["test_accuracy"] <= 1


def test_labels_are_smoothed_in_training_alone(digits: Images) -> None:
    torch.manual_seed(0)
    model = resnet20(channels=1, classes=10, size=8).eval()
    plain, smooth = (Classification(model, digits, torch.device("cpu"), label_smoothing=share) for share in (0.0, 0.1))
    batch = plain.read_train(torch.arange(50), seed=0)
    with torch.no_grad():
        logits = model((batch.pixels.float() - digits.mean[0]) / digits.deviation[0])
        even = -logits.log_softmax(1).mean()  # cross entropy with the same share for every class
        expected = 0.9 * plain.loss(batch, torch.Generator()) + 0.1 * even
        assert torch.allclose(smooth.loss(batch, torch.Generator()), expected, rtol=1e-4)
        assert abs(expected - plain.loss(batch, torch.Generator())) > 0.01
        assert torch.equal(smooth.score(batch), plain.score(batch))


def test_images_are_normalised_by_the_training_images(digits: Images) -> None:
    seen: list[torch.Tensor] = []

    class Watcher(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(x)
            return torch.zeros(len(x), 10)

    task = Classification(Watcher(), digits, torch.device("cpu"))
    task.loss(task.read_train(torch.arange(task.train_size), seed=0), torch.Generator())
    assert seen[0].mean().item() == pytest.approx(0, abs=1e-4)
    assert seen[0].std().item() == pytest.approx(1, abs=1e-4)
