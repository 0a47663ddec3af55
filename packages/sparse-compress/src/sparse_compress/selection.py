"""Exact selection by magnitude: the largest, all from a key on, blocks' largest.

Each selects from a tensor, or as a step of error feedback, which accumulates, selects and clears in one sweep. All take
the largest magnitudes first, so NaN and inf are among what they send. On a CPU a compiled kernel takes contiguous
float32 (gradients also of 16 bits), on a GPU Triton; plain torch and NumPy do the rest, and are the reference.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.util import find_spec
from math import inf
from typing import Any, ClassVar

import torch
from torch import Tensor

from sparse_compress.accumulator import Accumulator
from sparse_compress.arguments import WIRE_DTYPES, Bounds, check_blocks, flatten, integer
from sparse_compress.magnitude import key_of_inf, largest, largest_on_device, magnitude_keys, positions
from sparse_compress.native.library import SCRATCH, kernels
from sparse_compress.vector import SparseVector
from sparse_compress.vectors import concatenate, take

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Dtypes of gradients that the kernels accumulate, and their numbers there."""
MAX_ELEMENTS = 2**31 - 2**12  # of a Triton kernel: the last block's element numbers still fit int32
ANY = -1
"""Key that all elements reach: the k largest are selected."""
Blocks = Sequence[tuple[tuple[int, int], int]]
Plan = tuple[Blocks, int]


def topk(x: Tensor, k: int) -> SparseVector:
    """Selects the k elements of ``x`` largest in magnitude, as a sparse vector over ``x`` flattened.

        >>> topk(torch.tensor([0.0, 3.0, -5.0, 3.0]), 2).to_dense()
        tensor([ 0.,  3., -5.,  0.])

    The order is that of the bits without the sign: finite < inf < NaN, so non-finite elements come first. Ties go to
    the lowest index.

    On a CPU a compiled kernel takes float32 in one sweep as a rule, without a temporary of x's size; without a compiled
    file (``native``), or for other dtypes, NumPy partitions with temporaries of x's size. On a GPU Triton does radix
    select (``gpu``); without Triton, or for float64, torch sorts with temporaries. No GPU is waited for.

    Args:
        x: Dense tensor of any shape; float16, bfloat16, float32 or float64.
        k: Number of entries, ≥ 0.

    Returns:
        Exactly min(k, n) entries, explicit zeros included, so that its size on the wire is known beforehand.

    Raises:
        TypeError: x has another dtype or layout, or k is no integer.
        ValueError: k < 0, or x has more than 2³¹ − 1 elements.
    """
    k = integer(k, "k", expected="the number of entries to select")
    flat = flatten(x)
    k = min(k, len(flat))
    if k == len(flat):
        return gather(flat, torch.arange(k, device=flat.device))
    if k and _triton_takes(flat):
        from sparse_compress.gpu import select  # not before a GPU tensor comes: Triton is optional

        with torch.cuda.device(flat.device):
            return select.topk(flat, k)
    if k and kernels(flat):
        return _selected(flat, k, ANY)
    keys = magnitude_keys(flat)
    chosen = positions(largest(keys, k)) if flat.is_cpu else torch.sort(largest_on_device(keys, k)).values
    return gather(flat, chosen)


def reaching(flat: Tensor, key: int, k: int) -> SparseVector:
    """Selects the elements of a 1-D tensor with that key (magnitude as an integer) or larger; the k largest, if more.

    NaN and inf reach any key. On a GPU their number is read back.
    """
    key = min(key, key_of_inf(flat.dtype))
    if k and kernels(flat):
        return _selected(flat, k, key)
    chosen = positions(magnitude_keys(flat) >= key)
    return gather(flat, chosen) if len(chosen) <= k else topk(flat, k)


def _selected(flat: Tensor, k: int, key: int) -> SparseVector:
    selected = SparseVector.allocate(k, len(flat), torch.float32, flat.device)
    scratch = SCRATCH.of(_scratch_nbytes(len(flat), k))
    found = kernels().sc_select(flat.data_ptr(), len(flat), k, key, 0, *selected.run[:2], scratch.data_ptr())
    return selected if found == k else take(selected, [slice(0, found)])


def gather(flat: Tensor, at: Tensor) -> SparseVector:
    """Gathers the elements of a 1-D tensor at positions (int64, increasing)."""
    selected = SparseVector.allocate(len(at), len(flat), WIRE_DTYPES[flat.dtype], flat.device)
    selected.indices.copy_(at)
    selected.values.copy_(flat.index_select(0, at))
    return selected


def all_finite(x: Tensor | SparseVector) -> Tensor:
    """Whether all elements are finite, without waiting for a device; no temporary of x's size.

    Args:
        x: Floats, or a vector, whose values count.

    Returns:
        bool, 0-D, on x's device; nobody may write into it.
    """
    if library := kernels(x):
        run = (x.data_ptr(), x.numel()) if isinstance(x, Tensor) else x.run[1:]
        return _constant(bool(library.sc_finite(*run)))
    x = x if isinstance(x, Tensor) else x.values
    if not x.numel():
        return torch.ones((), dtype=torch.bool, device=x.device)
    least, most = torch.aminmax(x)
    return (least > -inf) & (most < inf)


class Selection:
    """Selection for one call: a callable from the accumulated tensor, 1-D, to the entries that are sent.

    Attributes:
        finds_nonfinite: Whether the largest magnitudes come first, NaN and inf among them.
    """

    finds_nonfinite: ClassVar[bool] = True

    def __call__(self, accumulated: Tensor) -> SparseVector:
        """Entries of a 1-D tensor, with their values."""
        raise NotImplementedError

    def plan(self, numel: int) -> Plan:
        """Selection that `step` may fuse with accumulating, bit for bit; by default none: it takes a sweep for each.

        Args:
            numel: Elements of the tensor.

        Returns:
            Blocks [low, high), which make up the tensor, in order, with the number of their largest that are selected;
            and the key that all of these reach, for which there is one block, or `ANY`.
        """
        return (), ANY

    def step(self, before: Accumulator, gradient: Tensor, momentum: float, out: Accumulator) -> SparseVector:
        """Accumulates the gradient, selects, and clears the entries that are sent: in one sweep where kernels can.

        Args:
            before: State accumulated until now.
            gradient: Dense, of any shape; left as it is.
            momentum: m of the correction, 0 without.
            out: Accumulator for the new state, without the entries that are sent; may be ``before``.

        Raises:
            ValueError: Blocks of the plan do not make up the tensor.
        """
        library, n = kernels(gradient, KINDS), gradient.numel()
        blocks, key = plan = self.plan(n)
        most = sum([k for _, k in blocks])
        fuses = 0 < most < n  # all that accumulated is no selection, and leaves the velocity
        if fuses and [edges for edges, _ in blocks] != [(0, n)]:
            check_blocks([edges for edges, _ in blocks], [k for _, k in blocks], n)
        if fuses and library:
            return _native_step(before, gradient, momentum, out, plan, most, library)
        if fuses and key == ANY and _triton_takes(gradient):
            return _triton_step(before, gradient, momentum, out, blocks)
        before.advance(gradient, momentum, out)
        sent = self(out.residual.view(-1))
        out.take_out(sent)
        return sent


@dataclass(frozen=True)
class Largest(Selection):
    """Selects the k largest, ties to the lowest index, as `topk` does.

    Args:
        k: Number of entries, ≥ 0.
    """

    k: int

    def __call__(self, accumulated: Tensor) -> SparseVector:
        return topk(accumulated, self.k)

    def plan(self, numel: int) -> Plan:
        return [((0, numel), min(self.k, numel))], ANY


@dataclass(frozen=True)
class Reaching(Selection):
    """Selects entries whose key is at least ``key``, the k largest where they are more.

    Args:
        key: Magnitude as an integer (`magnitude_keys`).
        k: Bound on the number of entries.
    """

    key: int
    k: int

    def __call__(self, accumulated: Tensor) -> SparseVector:
        return reaching(accumulated, self.key, self.k)

    def plan(self, numel: int) -> Plan:
        return [((0, numel), self.k)], min(self.key, key_of_inf(torch.float32))


@dataclass(frozen=True)
class LargestOfBlocks(Selection):
    """Selects the largest of every block [low, high), as many as its budget; of one without budget a NaN or inf.

    Args:
        bounds: Bounds of the blocks, which make up the tensor, in order.
        budgets: Entries of each, at most the block's length.

    Raises:
        ValueError: Of a call: the blocks do not make up the tensor, or a budget does not fit its block.
    """

    bounds: Bounds
    budgets: Sequence[int]

    def __call__(self, accumulated: Tensor) -> SparseVector:
        check_blocks(self.bounds, self.budgets, len(accumulated))
        chosen = []
        for (low, high), budget in zip(self.bounds, self.budgets, strict=True):
            found = topk(accumulated[low:high], budget or 1)  # inf and NaN are the largest
            chosen.append(found if budget or not bool(all_finite(found)) else topk(accumulated[low:high], 0))
        return concatenate(chosen)

    def plan(self, numel: int) -> Plan:
        check_blocks(self.bounds, self.budgets, numel)
        blocks = list(zip(self.bounds, self.budgets, strict=True))
        return (() if any(low < high and not budget for (low, high), budget in blocks) else blocks), ANY


def _native_step(
    before: Accumulator, gradient: Tensor, momentum: float, out: Accumulator, plan: Plan, most: int, library: Any
) -> SparseVector:
    """`Selection.step` by the kernels, block by block; at most so many entries in all."""
    blocks, key = [((int(low), int(high)), int(k)) for (low, high), k in plan[0]], int(plan[1])  # not of NumPy
    sent = SparseVector.allocate(int(most), gradient.numel(), torch.float32, gradient.device)
    kept = before.residual, before.velocity, out.residual, out.velocity
    v, u, new_v, new_u = [None if part is None else part.data_ptr() for part in kept]
    given = v, u, gradient.data_ptr(), KINDS[gradient.dtype], momentum, new_v, new_u
    indices, values, found = sent.run
    for (low, high), k in blocks:
        if k:
            scratch = SCRATCH.of(_scratch_nbytes(high - low, k))
            found = library.sc_step(*given, high - low, k, key, low, indices, values, scratch.data_ptr())
            indices, values = indices + 4 * k, values + 4 * k
    return sent if key == ANY or found == most else take(sent, [slice(0, found)])


def _triton_step(
    before: Accumulator, gradient: Tensor, momentum: float, out: Accumulator, blocks: Blocks
) -> SparseVector:
    """`Selection.step` on a GPU, block by block; those without a budget are empty."""
    from sparse_compress.gpu import select  # not before a GPU tensor comes: Triton is optional

    flat, sent = gradient.view(-1), [SparseVector.empty(0, device=gradient.device)]
    with torch.cuda.device(flat.device):
        for edges, k in blocks:
            if k:
                span = slice(*edges)
                sent.append(select.step_topk(before.part(span), flat[span], momentum, k, out.part(span)))
    return sent[1] if len(sent) == 2 else concatenate(sent)


@lru_cache(maxsize=1024)
def _scratch_nbytes(n: int, k: int) -> int:
    """Bytes of scratch memory of a selection; cached, because a call into the library costs more."""
    nbytes: int = kernels().sc_scratch(n, k)
    return nbytes


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def _triton_takes(x: Tensor) -> bool:
    """Whether Triton is installed and takes this tensor: contiguous, 16 or 32 bits, on a GPU. Others go by torch."""
    return x.is_cuda and x.dtype != torch.float64 and x.is_contiguous() and x.numel() <= MAX_ELEMENTS and _has_triton()


@cache
def _constant(value: bool) -> Tensor:
    """Constant tensor: making one takes longer than checking a thousand values."""
    return torch.tensor(value, device="cpu")
