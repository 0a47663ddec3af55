"""ResNet for large images (He et al. 2016, section 3): four stages of 64, 128, 256, 512 channels.

Shortcuts are projections where the shape changes (B); the 3×3 convolution of a bottleneck has the stride, as in
torchvision's. Images below 64 pixels keep their size through the first layers: a 3×3 convolution and no pooling
instead of 7×7 and pooling, as in the form that CIFAR is trained with (Liu's pytorch-cifar).
"""

from collections.abc import Callable, Sequence

from torch import Tensor, nn

STAGES = (64, 128, 256, 512)  # channels inside a block
SMALL = 64  # pixels a side, below which an image is not halved before the first stage


class Block(nn.Module):
    """Convolutions with batch normalisation, added to the shortcut. layers: (kernel, stride, channels out) of each."""

    def __init__(self, channels_in: int, layers: Sequence[tuple[int, int, int]]) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        width, stride = channels_in, 1
        for kernel, step, channels in layers:
            parts += [*_conv(width, channels, kernel, step), nn.ReLU(inplace=True)]
            width, stride = channels, stride * step
        self.residual = nn.Sequential(*parts[:-1])  # the last ReLU comes after the sum
        same = stride == 1 and width == channels_in
        self.shortcut = nn.Identity() if same else nn.Sequential(*_conv(channels_in, width, 1, stride))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """[n, c_in, h, w] -> [n, c, h/stride, w/stride]."""
        out: Tensor = self.relu(self.residual(x) + self.shortcut(x))
        return out


def basic(channels_in: int, channels: int, stride: int) -> Block:
    """Two 3×3 convolutions."""
    return Block(channels_in, [(3, stride, channels), (3, 1, channels)])


def bottleneck(channels_in: int, channels: int, stride: int) -> Block:
    """1×1, 3×3, and 1×1 to four times the channels."""
    return Block(channels_in, [(1, 1, channels), (3, stride, channels), (1, 1, 4 * channels)])


def resnet18(*, channels: int, classes: int, size: int) -> nn.Sequential:
    """18 layers: 11,689,512 parameters for ImageNet, 11,173,962 for CIFAR-10."""
    return _resnet(basic, 1, (2, 2, 2, 2), channels, classes, size)


def resnet50(*, channels: int, classes: int, size: int) -> nn.Sequential:
    """50 layers: 25,557,032 parameters for ImageNet, 23,520,842 for CIFAR-10."""
    return _resnet(bottleneck, 4, (3, 4, 6, 3), channels, classes, size)


def _resnet(
    block: Callable[[int, int, int], Block],
    widening: int,
    blocks: Sequence[int],
    channels: int,
    classes: int,
    size: int,
) -> nn.Sequential:
    """widening: channels out of a block / channels inside it. blocks: of each stage; all but the first halve."""
    width, stages = STAGES[0], list[nn.Module]()
    for number, (inside, count) in enumerate(zip(STAGES, blocks, strict=True)):
        for place in range(count):
            stages.append(block(width, inside, 2 if number and not place else 1))
            width = widening * inside
    model = nn.Sequential(
        *_stem(channels, size), *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes)
    )
    return model.apply(_he_normal)


def _stem(channels: int, size: int) -> list[nn.Module]:
    if size < SMALL:
        return [*_conv(channels, STAGES[0], 3, 1), nn.ReLU(inplace=True)]
    return [*_conv(channels, STAGES[0], 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, stride=2, padding=1)]


def _conv(channels_in: int, channels: int, kernel: int, stride: int) -> list[nn.Module]:
    conv = nn.Conv2d(channels_in, channels, kernel, stride=stride, padding=kernel // 2, bias=False)
    return [conv, nn.BatchNorm2d(channels)]


def _he_normal(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
