"""DeMo, decoupled momentum optimization (Peng, Quesnelle and Kingma, 2024)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Unpack

import torch
from communicators import Communicator
from torch import Tensor
from torch.optim import Optimizer

from local_sgd.algorithms.sparseloco import ChunkMean
from local_sgd.averaging import all_finite
from local_sgd.compression import Selected
from local_sgd.driver import Driver
from local_sgd.periodic import PeriodicAveraging
from local_sgd.rule import Part, Rule
from local_sgd.settings import Every, Settings, below_one, number, whole

LARGEST_CHUNK = 181  # its square is the most that 16 bits count, with a sign


@dataclass
class SignStep(Rule):
    """z ← (1 − η·λ)·z − η·sign(z − x̄), with the rate η of the parameter group."""

    weight_decay: float = 0.0
    anchors = ("anchor",)
    needs_rate = True

    def boundary(self, part: Part, x: Tensor, mean: Tensor) -> Tensor:
        del x
        z = part["anchor"]
        down = (z - mean).sign_()
        return z.mul_(1 - part.rate * self.weight_decay).sub_(down, alpha=part.rate)


class DeMo(PeriodicAveraging):
    """Every rank has a momentum of its own, and sends the largest coefficients of its cosine transform.

        m ← β·m + Δ                        Δ = η·g, what one step of SGD at rate η takes off
        q ← the largest coefficients of each block of m in the basis of the cosine transform;  m ← m − q
        Q ← the mean of each coefficient over the ranks that sent it
        z ← (1 − η·λ)·z − η·sign(Q in the basis of the model);  x ← z                            every step

    A step is as long as one of Adam at the same rate. Steps of `optimizer` are taken from zeros, so that Δ is not
    rounded beside the parameters: their values do not count in it, nor what else is written to them. The model is z,
    the same bits on all ranks if they compute matrix products alike: with unlike processors, devices or numbers of
    threads, give `verify`. z, m and what x is short of the exact step take as much memory as the model each, and up to
    seven vectors more of `bucket_bytes` each, for a moment in `average`.

    Differs from the paper's code: coefficients travel in bfloat16, whose rounding error stays in m, with places of 16
    bits (there 32 bits or the parameter's, and 64); m is kept as coefficients; a kernel of a convolution is a matrix
    with a row for each output.

    Args:
        optimizer: Inner optimizer: SGD without momentum in the paper, as m is the momentum; what it has of its own
            comes on top. Its rate is η, also that of the sign's step. It has no weight decay: see `weight_decay`.
        sync_every: Steps whose changes m takes up together, see `PeriodicAveraging`; 1 in the paper. The model moves by
            η in as many.
        topk: Coefficients that are sent of each block; all of a smaller one.
        chunk: Most rows and columns of a block, 181 at most: a matrix is cut into blocks of the largest divisors of its
            sides up to that, a vector into rows. A prime side gives blocks of one row, of which more is sent.
        decay: 0 ≤ β < 1, of the momentum each step.
        weight_decay: λ ≥ 0, decoupled as in AdamW.
        **settings: See `PeriodicAveraging`; `native` and `weighted` are refused.

    Raises:
        ValueError: Also for parameter groups without a rate, or with a weight decay.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        sync_every: Every = 1,
        topk: int = 32,
        chunk: int = 64,
        decay: float = 0.999,
        weight_decay: float = 0.0,
        **settings: Unpack[Settings],
    ) -> None:
        if refused := [name for name in ("weighted", "native") if settings.get(name)]:
            raise ValueError(f"DeMo averages over who sent a coefficient, without {refused[0]}=True: leave it out")
        if number("weight_decay", weight_decay) < 0:
            raise ValueError(f"weight_decay is {weight_decay}, expected 0 or more")
        _refuse_decay(optimizer)
        driver = Driver(CosineMean(topk=topk, chunk=chunk, decay=decay))
        super().__init__(optimizer, SignStep(weight_decay), sync_every=sync_every, driver=driver, **settings)
        for part in driver.parts:
            if part.remainder is None:
                part.remainder = torch.zeros_like(part.gather())

    def _take_step(self, closure: Callable[[], float] | None) -> float | None:
        """Leaves what parameters are short of the exact step in their remainders."""
        _refuse_decay(self.optimizer)
        loss = None if closure is None else closure()
        self._depart()
        parts, begun = self._driver.parts, [part.bucket.gather(part.tensors) for part in self._driver.parts]
        with torch.no_grad():
            try:
                for part in parts:
                    torch._foreach_zero_(part.tensors)
                self.optimizer.step()
                changes = [part.bucket.gather(part.tensors) for part in parts]
            except BaseException:
                for part, before in zip(parts, begun, strict=True):
                    part.bucket.scatter(before, part.tensors)
                raise
            for part, before, change in zip(parts, begun, changes, strict=True):
                part.bucket.scatter(before + change, part.tensors)
                assert part.remainder is not None
                part.remainder += change.sub_(part.bucket.gather(part.tensors).sub_(before))
        return loss


def _refuse_decay(optimizer: Optimizer) -> None:
    if any(group.get("weight_decay") for group in optimizer.param_groups):
        raise ValueError(
            "the optimizer inside has a weight decay, without effect on steps from zeros: give it weight_decay=0, "
            "and DeMo the weight_decay"
        )


class CosineMean(ChunkMean):
    """Sign of the mean of the largest coefficients of each block; residuals are coefficients, block by block."""

    def __init__(self, *, topk: int, chunk: int, decay: float) -> None:
        super().__init__(density=1.0, decay=below_one("decay", decay))
        if whole("chunk", chunk) > LARGEST_CHUNK:
            raise ValueError(f"chunk is {chunk}, expected {LARGEST_CHUNK} at most")
        self._topk, self._chunk = whole("topk", topk), chunk
        self.kind = f"cosines in blocks of {chunk}"

    def __repr__(self) -> str:
        return f"cosines(topk={self._topk}, chunk={self._chunk}, decay={self._decay!r})"

    def begin(self, parts: Sequence[Part], comm: Communicator, what: str) -> None:
        super().begin(parts, comm, what)
        self._starts = {id(part): self._starts_of(part, self.residuals[id(part)]) for part in parts}

    def select(self, part: Part, x: Tensor, weight: float) -> Selected:
        """Takes the exact change for x."""
        if weight and part.remainder is not None:
            x = part.bucket.gather(part.tensors).sub_(part["anchor"]).add_(part.remainder)
        return super().select(part, x, weight)

    def in_basis(self, part: Part, x: Tensor) -> Tensor:
        found = [x.new_empty(0)]
        for view in part.bucket.views(x):
            found.append(transformed(in_blocks(view, self._chunk)).reshape(-1))
        return torch.cat(found)

    def out_of_basis(self, part: Part, mean: Tensor) -> Tensor:
        """Sign, because a small change would be rounded off beside z; NaN everywhere if a coefficient is not finite."""
        if not all_finite(mean):
            return torch.full_like(mean, math.nan)
        change = torch.empty_like(mean)
        for to, rows in zip(part.bucket.views(change), self._by_tensor(part, mean), strict=True):
            blocks = in_blocks(to, self._chunk)
            blocks.copy_(transformed(rows.view(blocks.shape), back=True).sign_())
        return change

    def encoded(self, part: Part, x: Tensor) -> Tensor:
        """Values in bfloat16, then places in their blocks, of 16 bits. All are NaN if one is not finite.

        So nobody applies the mean, and nothing that is not finite stays in m.
        """
        largest, finite = torch.finfo(torch.bfloat16).max, bool(all_finite(x))
        values, places = [x.new_empty(0)], [x.new_empty(0, dtype=torch.int16)]
        for rows in self._by_tensor(part, x):
            at = rows.abs().topk(min(self._topk, rows.shape[1]), 1, sorted=False).indices
            values.append(rows.gather(1, at).clamp_(-largest, largest).view(-1))
            places.append(at.to(torch.int16).view(-1))
        sent = torch.cat(values) if finite else torch.full_like(torch.cat(values), math.nan)
        return torch.cat([sent.to(torch.bfloat16).view(torch.uint8), torch.cat(places).view(torch.uint8)])

    def decoded(self, part: Part, message: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        half = len(message) // 2
        values, places = message[:half].clone().view(torch.bfloat16), message[half:].clone().view(torch.int16)
        return self._starts[id(part)] + places, values.to(like.dtype)

    def _starts_of(self, part: Part, like: Tensor) -> Tensor:
        """Place of the block of each coefficient in a message."""
        starts, first = [torch.empty(0, dtype=torch.int64, device=like.device)], 0
        for rows in self._by_tensor(part, like):
            begin = first + rows.shape[1] * torch.arange(len(rows), device=like.device)
            starts.append(begin.repeat_interleave(min(self._topk, rows.shape[1])))
            first += rows.numel()
        return torch.cat(starts)

    def _by_tensor(self, part: Part, x: Tensor) -> Iterator[Tensor]:
        """Views of coefficients: of each parameter, a row a block."""
        for view in part.bucket.views(x):
            down, across, height, width = in_blocks(view, self._chunk).shape
            yield view.view(down * across, height * width)


def in_blocks(x: Tensor, chunk: int) -> Tensor:
    """View of (…, height, width) of a tensor: blocks of the largest divisors of its sides that are no more than chunk.

    A vector has one row; of further dimensions there is one row for each place in the first.
    """
    rows, columns = (x.shape[0], x.numel() // max(1, x.shape[0])) if x.ndim > 1 else (1, x.numel())
    height, width = side(rows, chunk), side(columns, chunk)
    return x.view(rows // height, height, columns // width, width).transpose(1, 2)


def transformed(blocks: Tensor, *, back: bool = False) -> Tensor:
    """Cosine transforms of blocks of (…, height, width), or back, in their own precision also inside autocast."""
    down, across = (cosines(side, blocks.dtype, blocks.device) for side in blocks.shape[-2:])
    with torch.autocast(blocks.device.type, enabled=False):
        return down.T @ blocks @ across if back else down @ blocks @ across.T


@cache
def side(length: int, chunk: int) -> int:
    """Largest divisor of a length that is no more than chunk; 1 for 0."""
    return next((side for side in range(min(length, chunk), 0, -1) if length % side == 0), 1)


@cache
def cosines(side: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Orthonormal matrix of the cosine transform (DCT-II): a row for each frequency."""
    places = torch.arange(side, dtype=torch.float64, device="cpu")
    found = torch.cos(math.pi / side * torch.outer(places, places + 0.5)) * math.sqrt(2 / side)
    found[0] /= math.sqrt(2)
    return found.to(device, dtype)
