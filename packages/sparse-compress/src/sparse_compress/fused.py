"""One step of error feedback: accumulate, select and clear in one sweep, by exact top-k or from a key on."""

import numpy as np
import torch
from torch import Tensor

from sparse_compress.accumulator import Accumulator
from sparse_compress.chunks import at_least
from sparse_compress.gpu.available import kernels_take
from sparse_compress.magnitude import bits_of
from sparse_compress.native.selecting import Step, take_gradient
from sparse_compress.reaching import limit_of, reachable, reached, reaching
from sparse_compress.threshold import sample_stride
from sparse_compress.topk import from_bits, topk
from sparse_compress.topk_cpu import SMALL, largest_entries
from sparse_compress.vector import SparseVector


def step_topk(before: Accumulator, gradient: Tensor, momentum: float, k: int, out: Accumulator) -> SparseVector:
    """Advance ``before`` by ``gradient`` into ``out`` (which may be ``before``), take the k largest out of it.

    The same bits as advance, topk and clear one after another, which it is for small or strided tensors, and on
    GPUs without Triton.
    """
    if k and kernels_take(gradient):
        return _step_in_triton(before, gradient, momentum, k, out)
    if 0 < k < gradient.numel() and take_gradient(gradient):
        sent = SparseVector.allocate(k, gradient.numel(), torch.float32, gradient.device)
        Step(before, gradient, momentum, out, into=sent).largest(0, sent.numel, k)
        return sent
    if gradient.is_cpu and gradient.is_contiguous() and 0 < k < gradient.numel() > SMALL:
        sent = _sweep(before, gradient, momentum, k, out)
    else:
        before.advance(gradient, momentum, out)
        sent = topk(out.residual, k)
    out.clear(sent)
    return sent


def step_reaching(
    before: Accumulator, gradient: Tensor, momentum: float, key: int, k: int, out: Accumulator
) -> SparseVector:
    """Advance ``before`` by ``gradient`` into ``out``, take what reaches ``key`` out of it, the k largest if more.

    The same bits as advance, ``reaching`` and clear one after another, which it is on GPUs and for strided tensors.
    """
    residual = out.residual.view(-1)
    if k > 0 and take_gradient(gradient):
        key = reachable(key, residual.dtype)
        return Step(before, gradient, momentum, out).reaching(len(residual), key, k)
    if gradient.is_cpu and gradient.is_contiguous():
        with np.errstate(all="ignore"):  # of the sums
            written = before.advance_by_chunks(gradient, momentum, out)
            key = reachable(key, residual.dtype)
            found = at_least(bits_of(residual), key, limit_of(len(residual), k), written)
        sent = reached(found, residual, k)
    else:
        before.advance(gradient, momentum, out)
        sent = reaching(residual, key, k)
    out.clear(sent)
    return sent


def _step_in_triton(before: Accumulator, gradient: Tensor, momentum: float, k: int, out: Accumulator) -> SparseVector:
    from sparse_compress.gpu import select  # not before a GPU tensor comes: Triton is optional

    with torch.cuda.device(gradient.device):
        return select.step_topk(before, gradient, momentum, k, out)


def _sweep(before: Accumulator, gradient: Tensor, momentum: float, k: int, out: Accumulator) -> SparseVector:
    residual = out.residual.view(-1)
    bits = bits_of(residual)
    with np.errstate(all="ignore"):  # of the sums
        sample = before.foresee(gradient, momentum, sample_stride(len(bits))).view(bits.dtype)
        written = before.advance_by_chunks(gradient, momentum, out)
        entries = largest_entries(bits, k, sample=sample, written=written)
    return from_bits(*entries, residual)
