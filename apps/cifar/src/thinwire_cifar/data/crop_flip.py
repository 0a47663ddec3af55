"""The augmentation of He et al. (2016) for CIFAR: pad by 4, crop at random, mirror every other image."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from thinwire_cifar.data.keyed import Keys, uniform

PADDING = 4  # pixels on each side


def crop_flip(pixels: Tensor, keys: Keys) -> Tensor:
    """Each image [c, h, w] of the batch [n, c, h, w] shifted by at most 4 pixels, black outside; half mirrored."""
    n, _, height, width = pixels.shape
    drawn = torch.from_numpy(uniform(keys, 3))
    shifts = (drawn[:, :2] * (2 * PADDING + 1)).long()
    mirrored = drawn[:, 2:] < 0.5
    rows = shifts[:, :1] + torch.arange(height)  # [n, h]
    columns = shifts[:, 1:] + torch.arange(width)  # [n, w]
    columns = torch.where(mirrored, columns.flip(1), columns)
    padded = pad(pixels, (PADDING,) * 4)
    # Indices [n, 1, 1], [n, h, 1] and [n, 1, w] put the channels last: [n, h, w, c].
    cropped = padded[torch.arange(n)[:, None, None], :, rows[:, :, None], columns[:, None, :]]
    return cropped.permute(0, 3, 1, 2)
