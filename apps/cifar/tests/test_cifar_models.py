"""Every model: as many parameters as published, a step that moves them all, images of every size."""

from pathlib import Path
from pkgutil import resolve_name

import pytest
import torch
from thinwire_cifar.catalogue import MODELS
from thinwire_cifar.classification import Batch, Classification
from thinwire_cifar.data.images import Images, Loaded
from thinwire_cifar.models.resnet_cifar import Block
from torch import nn

IMAGENET = {"channels": 3, "classes": 1000, "size": 224}
CIFAR10 = {"channels": 3, "classes": 10, "size": 32}
MNIST = {"channels": 1, "classes": 10, "size": 28}
DIGITS = {"channels": 1, "classes": 10, "size": 8}

TABLE = """He et al. 2016, Table 6 (0.27 M … 1.7 M), exactly as Idelbayev's pytorch_resnet_cifar10 lists them
torchvision's documentation: resnet18, resnet50, alexnet
Liu's pytorch-cifar: resnet18, resnet50, vgg16, vgg19 on CIFAR-10
Yang's pytorch-classification: alexnet on CIFAR-10 (2.47 M)
LeCun et al. 1998: LeNet-300-100; PyTorch's MNIST example: cnn
Touvron et al. 2021, Table 1: DeiT-Ti (5 M), exactly as timm's vit_tiny_patch16_224
He et al., for one channel: the first convolution has 2 · 9 · 16 fewer"""

PUBLISHED = [
    ("resnet20", CIFAR10, 269_722, "He"),
    ("resnet20", DIGITS, 269_434, "He"),
    ("resnet32", CIFAR10, 464_154, "He"),
    ("resnet56", CIFAR10, 853_018, "He"),
    ("resnet110", CIFAR10, 1_727_962, "He"),
    ("resnet18", IMAGENET, 11_689_512, "torchvision"),
    ("resnet18", CIFAR10, 11_173_962, "Liu"),
    ("resnet50", IMAGENET, 25_557_032, "torchvision"),
    ("resnet50", CIFAR10, 23_520_842, "Liu"),
    ("vgg16", CIFAR10, 14_728_266, "Liu"),
    ("vgg19", CIFAR10, 20_040_522, "Liu"),
    ("alexnet", IMAGENET, 61_100_840, "torchvision"),
    ("alexnet", CIFAR10, 2_472_266, "Yang"),
    ("mlp", MNIST, 266_610, "LeCun"),
    ("cnn", MNIST, 1_199_882, "PyTorch"),
    ("vit", IMAGENET, 5_717_416, "Touvron"),
]


def made(name: str, images: dict[str, int]) -> nn.Module:
    model: nn.Module = resolve_name(MODELS[name])(**images)
    return model


@pytest.mark.parametrize(("name", "images", "parameters", "source"), PUBLISHED)
def test_parameters_as_published(name: str, images: dict[str, int], parameters: int, source: str) -> None:
    assert source in TABLE
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in made(name, images).parameters()) == parameters


def test_every_model_is_in_the_table() -> None:
    assert {name for name, *_ in PUBLISHED} == set(MODELS)


def test_the_page_lists_every_model_and_its_parameters() -> None:
    page = (Path(__file__).parents[3] / "docs" / "apps" / "cifar.md").read_text()
    for name, _, parameters, _ in PUBLISHED:
        assert f"`{name}`" in page
        assert f"{parameters:,}" in page, (name, parameters)


@pytest.mark.few(7)
@pytest.mark.parametrize("images", [IMAGENET, CIFAR10, MNIST, DIGITS], ids=["imagenet", "cifar10", "mnist", "digits"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_for_images_of_every_data_set(name: str, images: dict[str, int]) -> None:
    with torch.device("meta"):
        logits = made(name, images)(torch.zeros(2, images["channels"], images["size"], images["size"]))
    assert logits.shape == (2, images["classes"])


@pytest.mark.few(6)
@pytest.mark.parametrize("name", MODELS)
def test_a_step_moves_every_parameter(name: str) -> None:
    torch.manual_seed(0)
    images = DIGITS if name != "alexnet" else CIFAR10
    size = images["size"]
    pixels = torch.randint(0, 17, (4, images["channels"], size, size), dtype=torch.uint8)
    split = Loaded(pixels=pixels, labels=torch.arange(4))
    data = Images(train=split, test=split, **images, mean=(8.0,), deviation=(5.0,))
    task = Classification(made(name, images), data, torch.device("cpu"))
    optimizer = torch.optim.SGD(task.model.parameters(), lr=0.01)
    before = [parameter.detach().clone() for parameter in task.model.parameters()]
    loss = task.loss(Batch(split.pixels, split.labels), torch.Generator())
    loss.backward()
    optimizer.step()
    assert loss.isfinite()
    assert 0.3 < loss.item() < 30  # ln 10 = 2.3
    still = [
        place
        for old, (place, new) in zip(before, task.model.named_parameters(), strict=True)
        if torch.equal(old, new) and not (name.startswith("vgg") and place.endswith("bias"))  # normalised away
    ]
    assert still == []


def test_a_vision_transformer_says_which_images_it_cannot_cut() -> None:
    with pytest.raises(ValueError, match="patches of 4 pixels; 30 pixels a side"):
        made("vit", {"channels": 1, "classes": 10, "size": 30})


def test_a_block_without_weights_is_its_shortcut() -> None:
    block = Block(2, 4, stride=2)
    torch.nn.init.zeros_(block.norm2.weight)
    x = torch.rand(1, 2, 4, 4)
    y = block(x)
    assert torch.equal(y[:, 1:3], x[:, :, ::2, ::2])
    assert not y[:, [0, 3]].any()
