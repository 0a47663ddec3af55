"""What stands for the second direction of layers that hear forwards only."""

import torch
from torch import Tensor, nn
from torch.nn.functional import conv1d, pad


class Lookahead(nn.Module):
    """Each feature's weighted sum of this frame and the `context` after it (Wang et al. 2016), then Hardtanh(0, 20)."""

    def __init__(self, features: int, context: int) -> None:
        super().__init__()
        bound = (context + 1) ** -0.5
        self.weight = nn.Parameter(torch.empty(features, context + 1).uniform_(-bound, bound))

    def forward(self, x: Tensor) -> Tensor:
        """x [n, frames, features], 0 behind each utterance's end -> the same shape."""
        ahead = pad(x.transpose(1, 2), (0, self.weight.shape[1] - 1))
        return conv1d(ahead, self.weight[:, None], groups=len(self.weight)).transpose(1, 2).clamp(0, 20)
