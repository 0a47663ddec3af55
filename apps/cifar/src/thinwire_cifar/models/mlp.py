"""LeNet-300-100 (LeCun et al. 1998): two hidden layers."""

from torch import nn

HIDDEN = (300, 100)


def mlp(*, channels: int, classes: int, size: int) -> nn.Sequential:
    """266,610 parameters for MNIST. ReLU instead of tanh."""
    first, second = HIDDEN
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(channels * size * size, first),
        nn.ReLU(inplace=True),
        nn.Linear(first, second),
        nn.ReLU(inplace=True),
        nn.Linear(second, classes),
    )
