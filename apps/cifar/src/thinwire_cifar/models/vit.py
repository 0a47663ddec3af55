"""A small vision transformer (Dosovitskiy et al. 2021) in the size that DeiT calls Ti (Touvron et al. 2021).

Patches of 16 pixels for images from 64 pixels on, of 4 from 16 on, of 2 below.
"""

import torch
from torch import Tensor, nn

WIDTH, DEPTH, HEADS = 192, 12, 3


def block() -> nn.TransformerEncoderLayer:
    """x + attention(norm(x)), then x + mlp(norm(x)); [n, tokens, width]."""
    how = {"activation": "gelu", "norm_first": True, "batch_first": True, "layer_norm_eps": 1e-6}
    return nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, **how)  # type: ignore[arg-type]


class VisionTransformer(nn.Module):
    """Patches and a class token with learned positions, DEPTH blocks; the class token is classified."""

    def __init__(self, *, channels: int, classes: int, size: int, patch: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, WIDTH, patch, stride=patch)
        self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.zeros(1, 1 + (size // patch) ** 2, WIDTH))
        self.blocks = nn.Sequential(*(block() for _ in range(DEPTH)))
        self.norm = nn.LayerNorm(WIDTH, eps=1e-6)
        self.classify = nn.Linear(WIDTH, classes)
        self.apply(_small_normal)
        nn.init.trunc_normal_(self.token, std=0.02)
        nn.init.trunc_normal_(self.positions, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Images [n, channels, size, size] -> logits [n, classes]."""
        patches = self.patches(x).flatten(2).transpose(1, 2)  # [n, patches, width]
        tokens = torch.cat([self.token.expand(len(x), -1, -1), patches], dim=1) + self.positions
        logits: Tensor = self.classify(self.norm(self.blocks(tokens)[:, 0]))
        return logits


def vit(*, channels: int, classes: int, size: int) -> VisionTransformer:
    """5,717,416 parameters for ImageNet, 5,362,762 for CIFAR-10. ValueError where patches do not fill the image."""
    patch = 16 if size >= 64 else 4 if size >= 16 else 2
    if size % patch:
        raise ValueError(f"vit cuts images into patches of {patch} pixels; {size} pixels a side are no multiple")
    return VisionTransformer(channels=channels, classes=classes, size=size, patch=patch)


def _small_normal(module: nn.Module) -> None:
    if isinstance(module, nn.MultiheadAttention):
        nn.init.trunc_normal_(module.in_proj_weight, std=0.02)
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        nn.init.zeros_(module.bias)
