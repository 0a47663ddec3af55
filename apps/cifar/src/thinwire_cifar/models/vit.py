"""A small vision transformer (Dosovitskiy et al. 2021) in the size that DeiT calls Ti (Touvron et al. 2021).

Patches of 16 pixels for images from 64 pixels on, of 4 from 16 on, of 2 below.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

WIDTH, DEPTH, HEADS = 192, 12, 3


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); [n, tokens, width]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH, eps=1e-6)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        x = x + self._attention(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out

    def _attention(self, x: Tensor) -> Tensor:
        n, tokens, _ = x.shape
        query, key, value = self.qkv(x).view(n, tokens, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(query, key, value)  # [n, heads, tokens, width / heads]
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(n, tokens, WIDTH))
        return out


class VisionTransformer(nn.Module):
    """Patches and a class token with learned positions, DEPTH blocks; the class token is classified."""

    def __init__(self, *, channels: int, classes: int, size: int, patch: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, WIDTH, patch, stride=patch)
        self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.zeros(1, 1 + (size // patch) ** 2, WIDTH))
        self.blocks = nn.Sequential(*(Block() for _ in range(DEPTH)))
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
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        nn.init.zeros_(module.bias)
