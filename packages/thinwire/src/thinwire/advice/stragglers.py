"""Late ranks: what they add to a step, by how ranks wait for one another.

Delays are drawn anew for each step and rank, independently. Synchronous ranks wait in every step for the longest of P
delays; ranks that meet after every τ steps for the longest of P means of τ delays, which is never more (Wang & Joshi,
MLSys 2019); in a partial allreduce for the arrival that begins the round (Li et al., PPoPP 2020).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from numbers import Real
from typing import Any

import torch
from torch import Tensor

BINS = 256
"""Delays are rounded to so many parts of the longest, each to the two nearest, so that their mean stays."""
ROUNDS = 512
"""Rounds of a partial allreduce that are played."""
MISSED = 8
"""Rounds in a row that a rank may miss: the default `max_staleness` of `EagerSGD`."""
HERE: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}
"""Where tensors of this module are, whatever torch's defaults."""


@dataclass(frozen=True)
class Stragglers:
    """Delays of ranks. Where P are more or fewer than these, the i-th is like number i modulo their number.

    by_rank: {seconds late: share of the steps} of each rank, or of one that stands for all; shares add up to 1.
    """

    by_rank: tuple[Mapping[float, float], ...]

    @classmethod
    def told(cls, late: Mapping[float, float]) -> Stragglers:
        """Those of {seconds late: share of each rank's steps}; in the others it is in time. Raises ValueError."""
        if not (
            late
            and all(isinstance(number, Real) for number in chain(late, late.values()))
            and all(0 < seconds < math.inf for seconds in late)
            and all(share > 0 for share in late.values())
        ):
            raise ValueError(
                f"late ranks are {dict(late)}, expected seconds above 0 and shares of steps, 0 < share <= 1, such as "
                "{0.3: 0.05}"
            )
        shares = math.fsum(late.values())
        if not shares <= 1:
            raise ValueError(
                f"late ranks are late in {shares:.3g} of the steps, expected shares that add up to 1 at most"
            )
        return cls(({0.0: 1 - shares} | {float(seconds): float(share) for seconds, share in late.items()},))

    @classmethod
    def measured(cls, times: Sequence[Sequence[float]]) -> Stragglers:
        """Those of the ranks whose steps took so many seconds, against the fastest step of all."""
        least = min(map(min, times))
        counts = [Counter(seconds - least for seconds in own) for own in times]
        return cls(tuple({late: n / count.total() for late, n in count.items()} for count in counts))

    def mean(self, size: int) -> float:
        """Seconds that ranks are late in a step, in the mean: what is added where nobody waits."""
        width, shares = self._binned
        return width * float(self._many(size) @ shares @ torch.arange(BINS + 1, **HERE)) / size

    def slowest(self, size: int) -> float:
        """Seconds that the slowest rank is late in a step, in its own mean: nothing hides these."""
        width, shares = self._binned
        return width * float((shares @ torch.arange(BINS + 1, **HERE))[:size].max())

    def late(self, size: int, *, every: int = 1) -> float:
        """Seconds added to a step of ranks that meet after every `every` steps.

        The expected maximum over the ranks of the mean of their delays in between. Exact for every step; for more it is
        that of delays in bins: too long by a bin at most, 1/256 of the longest delay, and never too short.
        """
        if (size, every) not in self._found:
            once = self._last(size)
            self._found[size, every] = once if every == 1 else min(once, self._last_mean(size, every))
        return self._found[size, every]

    def _last(self, size: int) -> float:
        """Expected longest of P delays: 1 − ∏ F between one delay and the next, added up; ∏ F by its logarithm."""
        drawn = self._drawn[:size]
        logs = [many * shares.cumsum(0).log() for many, (_, shares) in zip(self._many(size), drawn, strict=False)]
        steps = [log.diff(prepend=torch.zeros(1, **HERE)) for log in logs]
        delays, order = torch.cat([late for late, _ in drawn]).sort()
        within = torch.cat(steps)[order].cumsum(0).exp()
        within[delays < max(late[0] for late, _ in drawn)] = 0.0  # some rank is always later
        return float(delays[0] + (1 - within[:-1]) @ delays.diff())

    def _last_mean(self, size: int, every: int) -> float:
        width, shares = self._binned
        bins = BINS * every + 1
        sums = torch.fft.irfft(torch.fft.rfft(shares, n=bins) ** every, n=bins)
        everybody = sums.cumsum(1).clamp(0, 1).pow(self._many(size)[:, None]).prod(0)
        return width * float((1 - everybody[:-1]).sum()) / every

    def eager(self, size: int, quorum: str, *, compute: float, exchange: float) -> float:
        """Seconds of a step with a partial allreduce: as played, but for the luck of the draw never above waiting."""
        played = self.played(size, quorum, compute=compute, exchange=exchange)
        return min(played, compute + self.late(size) + exchange)

    def played(self, size: int, quorum: str, *, compute: float, exchange: float) -> float:
        """Seconds of a step in `ROUNDS` rounds of a partial allreduce.

        A round begins with the first arrival ("solo"), or that of a rank drawn for it ("majority"). Ranks arrive with
        the gradient of a step that began with the last round's result; who is late takes the next step at once.
        """
        draw = torch.Generator().manual_seed(0)
        arrivals = compute + self._delays(size, draw)
        gave = torch.zeros(size, **HERE)  # when each rank last gave a gradient
        missed, steps, ended = torch.zeros(size, **HERE), torch.zeros(size, **HERE), 0.0
        for seconds in arrivals:
            arrives = gave.clamp(min=ended) + seconds
            first = torch.randint(size, (), generator=draw, device="cpu") if quorum == "majority" else arrives.argmin()
            begins = torch.maximum(arrives[first], gave.where(missed >= MISSED, 0.0).max())
            late = gave > begins
            missed = torch.where(late, missed + 1, 0)
            gave = gave.where(late, arrives)
            steps, ended = steps + ~late, float(begins) + exchange
        paces = steps / gave.clamp(min=ended)
        return size / float(paces.sum())

    def _delays(self, size: int, draw: torch.Generator) -> Tensor:
        """Delays of each rank in each round, [rounds, ranks]."""
        each = -(-size // len(self.by_rank))
        drawn = []
        for own in self.by_rank:
            late, shares = torch.tensor(list(own.items()), **HERE).T
            drawn.append(late[torch.multinomial(shares, each * ROUNDS, replacement=True, generator=draw)])
        alike = torch.stack(drawn).view(-1, each, ROUNDS).transpose(0, 1).reshape(-1, ROUNDS)
        return alike[:size].T

    def _many(self, size: int) -> Tensor:
        """Number of ranks that are like each."""
        like = torch.arange(size, device="cpu") % len(self.by_rank)
        return torch.bincount(like, minlength=len(self.by_rank)).double()

    @cached_property
    def _found(self) -> dict[tuple[int, int], float]:
        """Waits by ranks and steps: one advice asks for the same few many times."""
        return {}

    @cached_property
    def _drawn(self) -> list[Tensor]:
        """Delays of each rank, in increasing order, and the share of steps with each, [2, delays]."""
        drawn = [sorted((late, share) for late, share in own.items() if share) for own in self.by_rank]
        return [torch.tensor(own, **HERE).T for own in drawn]

    @cached_property
    def _binned(self) -> tuple[float, Tensor]:
        """Seconds of a bin, and the share of steps in each, [ranks, BINS + 1]."""
        width = float(max(late[-1] for late, _ in self._drawn)) / BINS
        binned = torch.zeros(len(self._drawn), BINS + 1, **HERE)
        for row, (late, shares) in zip(binned, self._drawn, strict=True):
            place = late / width if width else late
            low = place.long().clamp(max=BINS - 1)
            row.index_add_(0, low, shares * (1 - (place - low))).index_add_(0, low + 1, shares * (place - low))
        return width, binned
