"""VGG with batch normalisation (Simonyan & Zisserman 2015) and the head that CIFAR is trained with: one linear layer.

The published figures are those of Liu's pytorch-cifar, whose convolutions keep their biases. Pooling rounds up, so that
images below 32 pixels reach the end as well; larger ones are averaged there.
"""

from collections.abc import Sequence
from functools import partial

from torch import nn

WIDTHS = (64, 128, 256, 512, 512)  # channels of each stage, which ends by halving the image


def _vgg(convolutions: Sequence[int], *, channels: int, classes: int, size: int) -> nn.Sequential:
    del size
    layers: list[nn.Module] = []
    for width, count in zip(WIDTHS, convolutions, strict=True):
        for _ in range(count):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
            channels = width
        layers.append(nn.MaxPool2d(2, ceil_mode=True))
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))
    return model.apply(_he_normal)


vgg16, vgg19 = partial(_vgg, (2, 2, 3, 3, 3)), partial(_vgg, (2, 2, 4, 4, 4))
"""13 and 16 convolutions: 14,728,266 and 20,040,522 parameters for CIFAR-10."""


def _he_normal(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        nn.init.zeros_(module.bias)  # type: ignore[arg-type]
