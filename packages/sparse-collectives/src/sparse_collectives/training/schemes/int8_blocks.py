"""Float32 as one byte an element, and one a block of 1,024 for its scale: a power of two, so that nothing is lost."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 1024
NOT_FINITE = -128
"""In place of a scale: the block held NaN or inf, and is read as NaN."""

LEAST, MOST = -126, 120
"""Exponents that are normal numbers, and with which 127 steps do not overflow."""


def packed(x: Tensor) -> Tensor:
    """x: 1-D float32, from the beginning of a block on. int8 of `packed_nbytes`: all elements, then all exponents.

    Of each element the nearest multiple of 2^e, where e is the least with which the block's largest keeps within 127
    steps. `x - unpacked(...)` is exact, except that of a block with NaN or inf it is NaN.
    """
    blocks = _in_blocks(x)
    largest = blocks.abs().amax(1)
    fraction, exponent = torch.frexp(largest)  # largest = fraction · 2^exponent, 1/2 ≤ fraction < 1
    scale = (exponent - 7 + (fraction >= 127.5 / 128).int()).clamp(LEAST, MOST)
    finite = torch.isfinite(largest)
    scale = torch.where(finite, scale, torch.zeros_like(scale))
    steps = (blocks / _power(scale)[:, None]).round().clamp(-127, 127).nan_to_num(0.0)
    exponents = torch.where(finite, scale, NOT_FINITE)
    return torch.cat([steps.view(-1)[: x.numel()].to(torch.int8), exponents.to(torch.int8)])


def unpacked(bytes_: Tensor, numel: int) -> Tensor:
    """The float32 elements that `packed` gave, rounded."""
    steps, exponents = bytes_.split_with_sizes([numel, bytes_.numel() - numel])
    power = torch.where(exponents == NOT_FINITE, torch.nan, _power(exponents.int().clamp(LEAST, MOST)))
    return (_in_blocks(steps.float()) * power[:, None]).view(-1)[:numel].clone()


def packed_nbytes(numel: int) -> int:
    """Bytes of so many elements."""
    return numel + -(-numel // BLOCK)


def _in_blocks(x: Tensor) -> Tensor:
    """(blocks, BLOCK), the last one filled up with zeros."""
    missing = -x.numel() % BLOCK
    return torch.cat([x, x.new_zeros(missing)]).view(-1, BLOCK)


def _power(exponent: Tensor) -> Tensor:
    """2^e exactly, by the bits of a float32."""
    return ((exponent.int() + 127) << 23).view(torch.float32)
