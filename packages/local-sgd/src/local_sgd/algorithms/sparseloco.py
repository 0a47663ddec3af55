"""SparseLoCo, sparse low-communication training (Sarfi et al., 2025)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any, Unpack

import torch
from communicators import Schedule, Work, schedules, start
from torch import Tensor
from torch.optim import Optimizer

from local_sgd.compression import ResidualSum, Selected
from local_sgd.driver import Driver
from local_sgd.outer import MakeOptimizer, MakeScheduler, OuterStep
from local_sgd.periodic import PeriodicAveraging
from local_sgd.rule import Part
from local_sgd.settings import Every, Settings, number

CHUNK, BITS = 4096, 14
SGD_07: MakeOptimizer = partial(torch.optim.SGD, lr=0.7)


class SparseLoCo(PeriodicAveraging):
    """Sends only the largest elements of a block's change, in 2 bits; each is averaged over the ranks that sent it.

        a ← β·e + z − x;  s ← the largest of each chunk of a, in 2 bits;  e ← a − s
        Δᵢ ← the mean of sᵢ over the ranks that sent one;  z ← outer(z, Δ);  x ← z               every τ steps

    On average an element is sent once in 1/density blocks, so a training needs many times that number. The decaying
    residual e stands in for an outer momentum. A rank that has finished sends nothing, and keeps its e. The model is z.

    Differs from the paper's code: chunks are of all parameters of a group and dtype in a row, not squares of each
    matrix; the two magnitudes of a chunk are the means of those above and below its mean, where the code has four
    levels for each tensor.

    Args:
        optimizer: Inner optimizer, AdamW in the paper.
        sync_every: τ, see `PeriodicAveraging`.
        density: Share of each chunk of 4,096 elements that is sent, one element at least; the paper's are 0.8 to 3 %.
        decay: 0 ≤ β ≤ 1, of the residual each block. What it takes off is lost; at 1 nothing is, but residuals of
            old blocks then count as much as those of new ones.
        outer: See `DiLoCo`; default SGD of rate 0.7.
        outer_scheduler: See `DiLoCo`.
        **settings: See `PeriodicAveraging`; `native` and `weighted` are refused.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        sync_every: Every = 15,
        density: float = 1 / 64,
        decay: float = 0.95,
        outer: MakeOptimizer = SGD_07,
        outer_scheduler: MakeScheduler | None = None,
        **settings: Unpack[Settings],
    ) -> None:
        if refused := [name for name in ("weighted", "native") if settings.get(name)]:
            raise ValueError(f"SparseLoCo averages over who sent an element, without {refused[0]}=True: leave it out")
        driver = Driver(ChunkMean(density=density, decay=decay))
        super().__init__(optimizer, OuterStep(outer, outer_scheduler), sync_every=sync_every, driver=driver, **settings)


class ChunkMean(ResidualSum):
    """Mean of the largest elements of each chunk over the ranks that sent them; its law: s + e′ = β·e + Δ.

    `in_basis`, `out_of_basis`, `encoded` and `decoded` say in which basis, of which chunks, and in which bytes.
    """

    kind = "chunks"

    def __init__(self, *, density: float, decay: float) -> None:
        if not 0 < number("density", density) <= 1:
            raise ValueError(f"density is {density}, expected above 0, and 1 at most")
        if not 0 <= number("decay", decay) <= 1:
            raise ValueError(f"decay is {decay}, expected 0 ≤ decay ≤ 1")
        self._density, self._decay = density, decay

    def __repr__(self) -> str:
        return f"chunks(density={self._density!r}, decay={self._decay!r})"

    def in_basis(self, part: Part, x: Tensor) -> Tensor:
        """Coefficients of a change, as many as elements; residuals are of these."""
        del part
        return x

    def out_of_basis(self, part: Part, mean: Tensor) -> Tensor:
        """Change of which these are the coefficients."""
        del part
        return mean

    def encoded(self, part: Part, x: Tensor) -> Tensor:
        """Message of the largest coefficients, as bytes; zeros in it do not count."""
        del part
        pieces = [_encoded(rows, self._count(rows)) for rows in _rows(x)]
        return torch.cat(pieces) if pieces else x.new_empty(0, dtype=torch.uint8)

    def decoded(self, part: Part, message: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Places, each once, and values in a message of a vector like that one; zeros were not sent."""
        del part
        at = [torch.empty(0, dtype=torch.int64, device=like.device)]
        found, begin, first = [like.new_empty(0)], 0, 0
        for rows in _rows(like):
            count = self._count(rows)
            end = begin + 4 * len(rows) + 7 * -(-len(rows) * count // 4)
            places, values = _decoded(message[begin:end], len(rows), count, like.dtype)
            starts = first + CHUNK * torch.arange(len(rows), device=like.device)
            at.append((places + starts[:, None]).view(-1))
            found.append(values.view(-1))
            begin, first = end, first + rows.numel()
        return torch.cat(at), torch.cat(found)

    def select(self, part: Part, x: Tensor, weight: float) -> Selected:
        residual = self.residuals[id(part)]
        if not weight:
            return Selected(part, residual.clone(), self.encoded(part, x.zero_()))
        x = self.in_basis(part, x).add_(residual, alpha=self._decay)
        return Selected(part, x, self.encoded(part, x))

    def launch(self, selected: Selected) -> Work[Tensor]:
        given = selected.given
        facts = f"{self._what}.average() of {given.numel()} elements, {given.dtype}, {self}"
        return start(self._mean(selected), self._comm, facts=facts, device=given.device)

    def mean(self, selected: Selected, result: Tensor, weight: float) -> Tensor:
        return torch.full_like(result, math.nan) if math.isnan(weight) else self.out_of_basis(selected.part, result)

    def feed_back(self, selected: Selected, result: Any, *, applied: bool) -> None:
        if applied:
            places, values = self.decoded(selected.part, selected.sent, selected.given)
            self.residuals[id(selected.part)] = selected.given.index_add_(0, places, values, alpha=-1)

    def _count(self, rows: Tensor) -> int:
        return max(1, round(self._density * rows.shape[1]))

    def _mean(self, selected: Selected) -> Schedule[Tensor]:
        message, like, comm = selected.sent, selected.given, self._comm
        total, senders = torch.zeros_like(like), torch.zeros_like(like)
        for each in (yield from schedules.allgather_blocks(message, [len(message)] * comm.size, comm.rank, comm.size)):
            places, values = self.decoded(selected.part, each, like)
            total.index_add_(0, places, values)
            senders.index_add_(0, places, (values != 0).to(values))
        return total.div_(senders.clamp_(min=1))


def _rows(x: Tensor) -> Iterator[Tensor]:
    """Views: rows of 4,096 elements, and the last elements as a row of their own."""
    whole = len(x) // CHUNK * CHUNK
    if whole:
        yield x[:whole].view(-1, CHUNK)
    if whole < len(x):
        yield x[whole:].view(1, -1)


def _encoded(rows: Tensor, count: int) -> Tensor:
    """Largest elements of each row as bytes: two magnitudes in bfloat16 a row, then 14 bits an element, 4 in 7 bytes.

    A magnitude is the mean of the elements above the row's mean, or of the others; zeros have one to themselves. An
    element's number is 4 · its place, +2 if it is negative, +1 if it is among those above.
    """
    places = rows.abs().topk(count, 1, sorted=False).indices.sort(1).values
    values = rows.gather(1, places)
    sizes = values.abs().double()
    above = sizes > torch.where(sizes.amin(1) > 0, sizes.mean(1), 0)[:, None]
    means = [(sizes * of).sum(1) / of.sum(1).clamp(min=1) for of in (~above, above)]
    levels = torch.stack(means, 1).clamp(max=torch.finfo(torch.bfloat16).max).to(torch.bfloat16)
    numbers = (4 * places + 2 * (values < 0) + above).view(-1)
    groups = torch.cat([numbers, numbers.new_zeros(-len(numbers) % 4)]).view(-1, 4)
    words = (groups << (BITS * torch.arange(4, device=rows.device))).sum(1)
    return torch.cat([levels.view(torch.uint8).view(-1), words.view(torch.uint8).view(-1, 8)[:, :7].reshape(-1)])


def _decoded(message: Tensor, rows: int, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Places in their rows, and values, of (rows, count)."""
    levels = message[: 4 * rows].clone().view(torch.bfloat16).view(rows, 2).to(dtype)
    words = torch.nn.functional.pad(message[4 * rows :].view(-1, 7), (0, 1)).view(torch.int64)
    numbers = (words >> (BITS * torch.arange(4, device=message.device))) & ((1 << BITS) - 1)
    numbers = numbers.view(-1)[: rows * count].view(rows, count)
    values = levels.gather(1, numbers & 1)
    return numbers >> 2, torch.where(numbers & 2 > 0, -values, values)
