"""Values in fewer bits: how each kind rounds, packs and unpacks.

A rounding is idempotent, and its error, x − rounded, is exact in float32, so that rounded + error = x.
For that, a value too large for the kind is cut to a multiple of its own unit in the last place.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from sparse_compress.arguments import check_bytes
from sparse_compress.native.library import kernels

SCALE_BYTES = 8  # of int8: the scale, and room that keeps what follows aligned


class Floats(NamedTuple):
    """Values of a dtype: float32 unrounded, float16 and bfloat16 in 2 bytes; those that would overflow are clamped.

    Kernels exist for bfloat16 alone: torch converts float16 in one pass, by the processor's own instructions.
    """

    dtype: torch.dtype

    def nbytes(self, count: int) -> int:
        """Bytes of ``count`` values."""
        return self.dtype.itemsize * count

    def pack(self, x: Tensor) -> Tensor:
        """Packs ``x``, float32, (k,), as uint8, (nbytes(k),); rounds to nearest, ties to even. inf and NaN stay so."""
        if self.dtype == torch.float32:
            return x.contiguous().view(torch.uint8)
        if self.dtype == torch.bfloat16 and (library := kernels(x)):
            packed = torch.empty(2 * len(x), dtype=torch.uint8, device="cpu")
            library.sc_to_bf16(x.data_ptr(), len(x), packed.data_ptr())
            return packed
        most = torch.finfo(self.dtype).max
        if _known_within(x, most):
            return x.to(self.dtype).view(torch.uint8)
        rounded = x.to(self.dtype).masked_fill_(x.isnan(), torch.nan)  # conversions differ in what they make of NaN
        overflowed = rounded.isinf() & x.isfinite()
        unit = last_place(x)
        clamped = torch.copysign((most / unit).floor() * unit, x)
        return torch.where(overflowed, clamped.to(self.dtype), rounded).view(torch.uint8)

    def unpack(self, data: Tensor, out: Tensor) -> Tensor:
        """Unpacks ``out``, float32, from at least as many bytes; on a CPU ValueError for what ``pack`` cannot give."""
        if self.dtype == torch.bfloat16 and (library := kernels(data, (torch.uint8,))):
            library.sc_of_bf16(data.data_ptr(), len(out), out.data_ptr())
            return out
        return out.copy_(data[: self.nbytes(len(out))].view(self.dtype))


class Int8(NamedTuple):
    """Values in 1 byte: multiples −127 … 127 of one power of two per message, the least that holds the largest value.

    −128 stands for a value that is not finite, and becomes NaN.
    """

    def nbytes(self, count: int) -> int:
        return SCALE_BYTES + count

    def pack(self, x: Tensor) -> Tensor:
        if library := kernels(x):
            packed = torch.zeros(self.nbytes(len(x)), dtype=torch.uint8, device="cpu")
            power = library.sc_to_int8(x.data_ptr(), len(x), packed.data_ptr() + SCALE_BYTES)
            packed[:4].view(torch.int32)[0] = power
            return packed
        finite = None if _known_within(x, torch.finfo(x.dtype).max) else x.isfinite()
        x = x if finite is None else torch.where(finite, x, 0)
        largest = x.abs().amax() if len(x) else x.new_zeros(())
        # largest = m · 2^e with ½ ≤ m < 1: in units of 2^(e − 7) it is below 128, and rounds to 127 at most or is cut.
        exponent = (torch.frexp(largest).exponent - 7).clamp(-126, 126).masked_fill(largest == 0, -126)
        steps = (x * power_of_two(-exponent)).round().clamp_(-127, 127)
        steps = (steps if finite is None else torch.where(finite, steps, -128)).to(torch.int8)
        head = torch.stack([exponent, torch.zeros_like(exponent)]).int().view(torch.uint8)
        return torch.cat([head, steps.view(torch.uint8)])

    def unpack(self, data: Tensor, out: Tensor) -> Tensor:
        exponent = data[:4].view(torch.int32)
        if exponent.is_cpu and not -126 <= int(exponent) <= 126:
            raise ValueError(f"corrupted scale: 2^{int(exponent)}, expected 2^−126 … 2^126")
        steps = data[SCALE_BYTES : SCALE_BYTES + len(out)].view(torch.int8)
        if library := kernels(steps, (torch.int8,)):
            library.sc_of_int8(steps.data_ptr(), len(out), int(exponent), out.data_ptr())
            return out
        return torch.mul(steps.float(), power_of_two(exponent), out=out).masked_fill_(steps == -128, torch.nan)


Values = Floats | Int8
"""Kind of values on the wire."""

VALUES: dict[str, Values] = {
    "fp32": Floats(torch.float32),
    "bf16": Floats(torch.bfloat16),
    "fp16": Floats(torch.float16),
    "int8": Int8(),
}


def aligned(data: Tensor) -> Tensor:
    """Bytes that can be viewed as 4-byte numbers: copied only where they begin in the middle of a word.

    TypeError for anything but a contiguous 1-D uint8 tensor.
    """
    check_bytes(data)
    if not len(data):
        return data.new_empty(0)  # NumPy gives empty ones a stride of 0
    return data.clone() if data.data_ptr() % 4 or data.storage_offset() % 4 else data


def power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent for −126 … 127, made from its bits, so that it is exact on every device."""
    return ((exponent.int() + 127) << 23).view(torch.float32)


def last_place(x: Tensor) -> Tensor:
    """Unit in the last place of each finite float32: 2^−23 of the power of two at or below |x|."""
    exponent = (x.view(torch.int32) >> 23 & 0xFF) - 127 - 23
    return power_of_two(exponent.clamp(-126, 127))


def leftover(x: Tensor, rounded: Tensor, out: Tensor) -> Tensor:
    """Rounding error x − rounded, 0 where either is not finite, written to ``out``."""
    if (library := kernels(x)) and kernels(rounded):
        library.sc_leftover(x.data_ptr(), rounded.data_ptr(), len(x), out.data_ptr())
        return out
    error = torch.sub(x, rounded, out=out)
    if _known_within(error, torch.finfo(error.dtype).max):
        return error
    return error.masked_fill_(~error.isfinite(), 0)


def _known_within(x: Tensor, most: float) -> bool:
    """Whether no element is NaN or beyond ±most, so that nothing needs mending; False on a GPU, which is not asked."""
    if not x.is_cpu:
        return False
    # as Python's numbers: NumPy 1 warns where it compares a signalling NaN with one
    return not x.numel() or bool(-most <= x.numpy().min().item() and x.numpy().max().item() <= most)
