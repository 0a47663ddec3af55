"""ResNet-20."""

import pytest
import torch
from cifar.catalogue import MODELS
from cifar.resnet import Block, resnet20


@pytest.mark.parametrize(("channels", "size", "parameters"), [(1, 8, 269_434), (3, 32, 269_722)])
def test_parameters_as_published_and_logits_per_class(channels: int, size: int, parameters: int) -> None:
    model = resnet20(channels=channels, classes=10)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert model(torch.zeros(2, channels, size, size)).shape == (2, 10)


def test_a_block_without_weights_is_its_shortcut() -> None:
    block = Block(2, 4, stride=2)
    torch.nn.init.zeros_(block.norm2.weight)
    x = torch.rand(1, 2, 4, 4)
    y = block(x)
    assert torch.equal(y[:, 1:3], x[:, :, ::2, ::2])
    assert not y[:, [0, 3]].any()


def test_catalogue_names_are_models() -> None:
    assert set(MODELS) == {"resnet20"}
