"""DeMo, decoupled momentum optimization (Peng, Quesnelle and Kingma, 2024)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Unpack

import torch
from communicators import Communicator
from torch import Tensor
from torch.optim import Optimizer

from local_sgd.algorithms.sparseloco import ChunkMean, InChunks
from local_sgd.driver import Driver
from local_sgd.periodic import PeriodicAveraging
from local_sgd.rule import Part, Rule
from local_sgd.settings import Every, Settings, number

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

        m ← β·m + z − x                    z − x = η·g after one step of SGD at rate η
        q ← the largest coefficients of each block of m in the basis of the cosine transform;  m ← m − q
        Q ← the mean of each coefficient over the ranks that sent it
        z ← (1 − η·λ)·z − η·sign(Q in the basis of the model);  x ← z                            every step

    A step is as long as one of Adam at the same rate. The model is z, the same bits on all ranks if they compute a
    matrix product alike: with unlike devices, give `verify`.

    Differs from the paper's code: coefficients travel in bfloat16, whose rounding error stays in m, with places of 16
    bits (there 32 bits or the parameter's, and 64); a kernel of a convolution is a matrix with a row for each output.

    Args:
        optimizer: Inner optimizer: SGD without momentum in the paper, as m is the momentum; what it has of its own
            comes on top. Its rate is η, also that of the sign's step. Its own weight decay would go through m: see
            `weight_decay`.
        sync_every: See `PeriodicAveraging`; 1 in the paper.
        topk: Coefficients that are sent of each block; all of a smaller one.
        chunk: Most rows and columns of a block, 181 at most: a matrix is cut into blocks of the largest divisors of its
            sides up to that, a vector into rows. A prime side gives blocks of one row, of which more is sent.
        decay: 0 ≤ β < 1, of the momentum each step.
        weight_decay: λ ≥ 0, decoupled as in AdamW.
        **settings: See `PeriodicAveraging`; `native` and `weighted` are refused.

    Raises:
        ValueError: Also for parameter groups without a rate.
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
        driver = Driver(Cosines(decay=decay, topk=topk, chunk=chunk))
        super().__init__(optimizer, SignStep(weight_decay), sync_every=sync_every, driver=driver, **settings)


@dataclass(frozen=True)
class Cosines(InChunks):
    """Settings of a `CosineMean`."""

    topk: int = 32
    chunk: int = 64

    def __post_init__(self) -> None:
        for name, value, most in (("topk", self.topk, math.inf), ("chunk", self.chunk, LARGEST_CHUNK)):
            if value != int(number(name, value)) or not 1 <= value <= most:
                raise ValueError(f"{name} is {value}, expected a whole number from 1 to {most}")
        if not 0 <= number("decay", self.decay) < 1:
            raise ValueError(f"decay is {self.decay}, expected 0 ≤ decay < 1")

    def __repr__(self) -> str:
        """Text that is the same on every rank."""
        return f"cosines(topk={self.topk}, chunk={self.chunk}, decay={self.decay!r})"

    def sum_of(self, parts: Sequence[Part], comm: Communicator, what: str) -> CosineMean:
        return CosineMean(parts, self, comm, what)


class CosineMean(ChunkMean):
    """Sign of the mean of the largest coefficients of each block; residuals are coefficients, block by block."""

    kind = "cosines"
    _settings: Cosines

    def in_basis(self, part: Part, x: Tensor) -> Tensor:
        found = [
            (cosines(blocks.shape[-2], x) @ blocks @ cosines(blocks.shape[-1], x).T).reshape(-1)
            for blocks in (in_blocks(view, self._settings.chunk) for view in part.bucket.views(x))
        ]
        return torch.cat(found) if found else x

    def out_of_basis(self, part: Part, mean: Tensor) -> Tensor:
        """Sign, because a small change would be rounded off beside z."""
        change = torch.empty_like(mean)
        pairs = zip(part.bucket.views(change), self._by_tensor(part, mean), strict=True)
        for to, rows in pairs:
            blocks = in_blocks(to, self._settings.chunk)
            height, width = blocks.shape[-2:]
            blocks.copy_((cosines(height, mean).T @ rows.view(blocks.shape) @ cosines(width, mean)).sign_())
        return change

    def encoded(self, part: Part, x: Tensor) -> Tensor:
        """Values in bfloat16, then places in their blocks, of 16 bits."""
        largest = torch.finfo(torch.bfloat16).max
        values, places = [x.new_empty(0)], [x.new_empty(0, dtype=torch.int16)]
        for rows in self._by_tensor(part, x):
            at = rows.abs().topk(min(self._settings.topk, rows.shape[1]), 1, sorted=False).indices
            values.append(rows.gather(1, at).clamp_(-largest, largest).view(-1))
            places.append(at.to(torch.int16).view(-1))
        return torch.cat([torch.cat(values).to(torch.bfloat16).view(torch.uint8), torch.cat(places).view(torch.uint8)])

    def decoded(self, part: Part, message: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        half = len(message) // 2
        values, places = message[:half].clone().view(torch.bfloat16), message[half:].clone().view(torch.int16).long()
        starts, first = [places.new_empty(0)], 0
        for rows in self._by_tensor(part, like):
            begin = first + rows.shape[1] * torch.arange(len(rows), device=like.device)
            starts.append(begin.repeat_interleave(min(self._settings.topk, rows.shape[1])))
            first += rows.numel()
        return places + torch.cat(starts), values.to(like.dtype)

    def _by_tensor(self, part: Part, x: Tensor) -> Iterator[Tensor]:
        """Views of coefficients: of each parameter, a row a block."""
        for view in part.bucket.views(x):
            down, across, height, width = in_blocks(view, self._settings.chunk).shape
            yield view.view(down * across, height * width)


def in_blocks(x: Tensor, chunk: int) -> Tensor:
    """View of (…, height, width) of a tensor: blocks of the largest divisors of its sides that are no more than chunk.

    A vector has one row; of further dimensions there is one row for each place in the first.
    """
    rows, columns = (x.shape[0], x.numel() // max(1, x.shape[0])) if x.ndim > 1 else (1, x.numel())
    height, width = side(rows, chunk), side(columns, chunk)
    return x.view(rows // height, height, columns // width, width).transpose(1, 2)


@cache
def side(length: int, chunk: int) -> int:
    """Largest divisor of a length that is no more than chunk; 1 for 0."""
    return next((side for side in range(min(length, chunk), 0, -1) if length % side == 0), 1)


def cosines(side: int, like: Tensor) -> Tensor:
    """Orthonormal matrix of the cosine transform (DCT-II): a row for each frequency."""
    return _cosines(side, like.dtype, like.device)


@cache
def _cosines(side: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    places = torch.arange(side, dtype=torch.float64)
    found = torch.cos(math.pi / side * torch.outer(places, places + 0.5)) * math.sqrt(2 / side)
    found[0] /= math.sqrt(2)
    return found.to(device, dtype)
