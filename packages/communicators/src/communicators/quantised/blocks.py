"""Float32 in 8 or 4 bits an element, and a byte a block of 1,024 for its scale.

The scale is a power of two, so that what is rounded and what is left over are the input exactly.

Block by block, as 8-bit optimizers do (Dettmers et al., ICLR 2022).
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 1024
BITS = (8, 4)
NOT_FINITE = -128
"""Mark in place of a scale: the block held NaN or inf, and is read as NaN."""

LEAST = -126
"""The least exponent of a normal number."""


def packed(x: Tensor, bits: int = 8) -> Tensor:
    """Packs 1-D float32, from the beginning of a block on, into int8: all elements, then all exponents.

    Each element becomes the nearest multiple of 2^e, where e is the least with which the block's largest keeps within
    2^(bits − 1) − 1 steps. `x - unpacked(...)` is exact, except that for a block with NaN or inf it is NaN. The result
    has `packed_nbytes` bytes.
    """
    blocks, most = _in_blocks(x), _most_steps(bits)
    largest = blocks.abs().amax(1)
    fraction, exponent = torch.frexp(largest)  # largest = fraction · 2^exponent, 1/2 ≤ fraction < 1
    beyond = fraction >= (most + 0.5) / (most + 1)  # would be rounded to one step too many
    scale = (exponent - (bits - 1) + beyond.int()).clamp(LEAST, _most_exponent(bits))
    finite = torch.isfinite(largest)
    scale = torch.where(finite, scale, torch.zeros_like(scale))
    steps = (blocks / _power(scale)[:, None]).round().clamp(-most, most).nan_to_num(0.0)
    exponents = torch.where(finite, scale, NOT_FINITE)
    return torch.cat([_nibbles(steps.view(-1)[: x.numel()].to(torch.int8), bits), exponents.to(torch.int8)])


def unpacked(bytes_: Tensor, numel: int, bits: int = 8) -> Tensor:
    """The float32 elements that `packed` gave, rounded."""
    nbytes = _steps_nbytes(numel, bits)
    coded, exponents = bytes_.split_with_sizes([nbytes, bytes_.numel() - nbytes])
    power = torch.where(exponents == NOT_FINITE, torch.nan, _power(exponents.int().clamp(LEAST, _most_exponent(bits))))
    return (_in_blocks(_steps(coded, numel, bits).float()) * power[:, None]).view(-1)[:numel].clone()


def packed_nbytes(numel: int, bits: int = 8) -> int:
    """Bytes of `numel` packed elements."""
    return _steps_nbytes(numel, bits) + -(-numel // BLOCK)


def _steps_nbytes(numel: int, bits: int) -> int:
    return -(-numel * bits // 8)


def _most_steps(bits: int) -> int:
    return (1 << (bits - 1)) - 1


def _most_exponent(bits: int) -> int:
    """Largest exponent with which the most steps do not overflow."""
    return 128 - bits


def _nibbles(steps: Tensor, bits: int) -> Tensor:
    """Steps as int8; those of 4 bits two in one byte, the first in the low half."""
    if bits == 8:
        return steps
    pairs = torch.cat([steps, steps.new_zeros(steps.numel() % 2)]).view(-1, 2)
    return (pairs[:, 0] & 15) | (pairs[:, 1] << 4)


def _steps(coded: Tensor, numel: int, bits: int) -> Tensor:
    if bits == 8:
        return coded
    return torch.stack([(coded << 4) >> 4, coded >> 4], 1).view(-1)[:numel]  # >> keeps the sign


def _in_blocks(x: Tensor) -> Tensor:
    """Blocks of shape (blocks, BLOCK), the last one filled up with zeros."""
    missing = -x.numel() % BLOCK
    return torch.cat([x, x.new_zeros(missing)]).view(-1, BLOCK)


def _power(exponent: Tensor) -> Tensor:
    """2^e exactly, by the bits of a float32."""
    return ((exponent.int() + 127) << 23).view(torch.float32)
