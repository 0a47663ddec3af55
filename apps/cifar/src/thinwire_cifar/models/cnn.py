"""The small network of PyTorch's MNIST example: two convolutions, pooling, two linear layers, dropout."""

from torch import nn

HIDDEN = 128


def cnn(*, channels: int, classes: int, size: int) -> nn.Sequential:
    """1,199,882 parameters for MNIST. Images from 6 pixels on."""
    side = (size - 4) // 2  # two valid 3×3 convolutions, then halved
    return nn.Sequential(
        nn.Conv2d(channels, 32, 3),
        nn.ReLU(inplace=True),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(64 * side * side, HIDDEN),
        nn.ReLU(inplace=True),
        nn.Dropout(0.5),
        nn.Linear(HIDDEN, classes),
    )
