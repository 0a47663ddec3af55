"""ResNet for small images (He et al. 2016, section 4.2): 6·blocks + 2 layers, three stages of 16, 32, 64 channels.

Parameters for CIFAR-10 (three channels, ten classes), with shortcuts that have none (A): the paper's Table 6 says 0.27,
0.46, 0.85 and 1.7 million.
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, relu

STAGES = (16, 32, 64)  # channels


class Block(nn.Module):
    """Two 3×3 convolutions and an identity shortcut, subsampled and padded with zeros where the shape changes (A)."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv3x3(channels_in, channels, stride)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = _conv3x3(channels, channels, 1)
        self.norm2 = nn.BatchNorm2d(channels)
        self.stride = stride
        self.added_channels = channels - channels_in

    def forward(self, x: Tensor) -> Tensor:
        """[n, c_in, h, w] -> [n, c, h/stride, w/stride]."""
        y = relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        return relu(y + self._shortcut(x))

    def _shortcut(self, x: Tensor) -> Tensor:
        if self.stride == 1:
            return x
        before = self.added_channels // 2
        return pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, before, self.added_channels - before))


class ResNet(nn.Module):
    """`blocks` blocks a stage; the later two stages halve the image, of any size."""

    def __init__(self, blocks: int, *, channels: int, classes: int, size: int) -> None:
        super().__init__()
        del size
        self.conv = _conv3x3(channels, STAGES[0], 1)
        self.norm = nn.BatchNorm2d(STAGES[0])
        width, stages = STAGES[0], []
        for number, next_width in enumerate(STAGES):
            for block in range(blocks):
                stages.append(Block(width, next_width, stride=2 if number and not block else 1))
                width = next_width
        self.stages = nn.Sequential(*stages)
        self.classify = nn.Linear(width, classes)
        self.apply(_he_normal)

    def forward(self, x: Tensor) -> Tensor:
        """Images [n, channels, h, w] -> logits [n, classes]."""
        y = self.stages(relu(self.norm(self.conv(x))))
        logits: Tensor = self.classify(y.mean(dim=(2, 3)))
        return logits


resnet20, resnet32, resnet56, resnet110 = (partial(ResNet, blocks) for blocks in (3, 5, 9, 18))
"""269,722, 464,154, 853,018 and 1,727,962 parameters for CIFAR-10; resnet20 has 269,434 for one channel."""


def _conv3x3(channels_in: int, channels: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(channels_in, channels, kernel_size=3, stride=stride, padding=1, bias=False)


@torch.no_grad()
def _he_normal(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d | nn.Linear):
        nn.init.kaiming_normal_(module.weight)
