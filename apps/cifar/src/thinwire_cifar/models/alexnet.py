"""AlexNet in one column (Krizhevsky 2014, "One weird trick"): five convolutions, and three linear layers or one.

For images from 64 pixels on as torchvision has it. Smaller ones take the form in which CIFAR is trained (Yang's
pytorch-classification): more padding in front, one linear layer behind. Their pooling rounds up, so that images below
32 pixels reach the end as well.
"""

from torch import nn

SMALL = 64  # pixels a side, below which an image takes the small form
HIDDEN = 4096


def alexnet(*, channels: int, classes: int, size: int) -> nn.Sequential:
    """61,100,840 parameters for ImageNet, 2,472,266 for CIFAR-10."""
    small = size < SMALL
    pool = nn.MaxPool2d(2, stride=2, ceil_mode=True) if small else nn.MaxPool2d(3, stride=2)
    return nn.Sequential(
        nn.Conv2d(channels, 64, 11, stride=4, padding=5 if small else 2),
        nn.ReLU(inplace=True),
        pool,
        nn.Conv2d(64, 192, 5, padding=2),
        nn.ReLU(inplace=True),
        pool,
        nn.Conv2d(192, 384, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(384, 256, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(256, 256, 3, padding=1),
        nn.ReLU(inplace=True),
        pool,
        nn.AdaptiveAvgPool2d(1 if small else 6),
        nn.Flatten(),
        *([nn.Linear(256, classes)] if small else _head(classes)),
    )


def _head(classes: int) -> list[nn.Module]:
    return [
        nn.Dropout(),
        nn.Linear(256 * 6 * 6, HIDDEN),
        nn.ReLU(inplace=True),
        nn.Dropout(),
        nn.Linear(HIDDEN, HIDDEN),
        nn.ReLU(inplace=True),
        nn.Linear(HIDDEN, classes),
    ]
