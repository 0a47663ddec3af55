"""Compressed mean over ranks of the change of vectors since all agreed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from communicators import Communicator, Work, schedules, start
from torch import Tensor

from local_sgd.averaging import Arrived, Averaging
from local_sgd.compression.sums import CompressedSum, Launched
from local_sgd.nonfinite import all_finite
from local_sgd.parts import Part


class CompressedAveraging(Averaging):
    """Computes z + Σ w·(x − z) / Σ w, the sum being compressed, with its residuals, and the weights w exact.

    z is the first anchor of each part, the same bits on all ranks. Residuals are in units of the sum. A rank of
    weight 0 sends its residual.
    """

    def __init__(self, comm: Communicator, what: str, parts: Sequence[Part], anchor: str, sums: CompressedSum) -> None:
        super().__init__(comm, what, native=False)
        self._parts, self._anchor, self._sums = parts, anchor, sums
        self._launched: list[Launched] = []
        self._head: Work[Tensor] | None = None
        self._began = 0.0

    def now(self, vectors: Sequence[Tensor], weight: float, *, finished: bool) -> Arrived:
        self.launch(vectors, weight, finished=finished)
        return self.arrived()

    def launch(self, vectors: Sequence[Tensor], weight: float, *, finished: bool) -> None:
        """Starts the exchange; a sum that does not run in the background is waited for here."""
        with self._keeping_errors():
            self._arrived, self._began = None, self._comm.clock()
            spoilt = False
            for part, x in zip(self._parts, vectors, strict=True):
                change = (x - part[self._anchor]).mul_(weight) if weight else torch.zeros_like(x)
                if not self._sums.carries_nan and not all_finite(change):
                    spoilt = True
                    change.zero_()  # or it would stay in a residual
                self._launched.append(self._sums.launch(part, change))
            self._head = self._start_head(float("nan") if spoilt else weight, finished)
            self._waited += self._comm.clock() - self._began

    def _start_head(self, weight: float, finished: bool) -> Work[Tensor]:
        head = torch.tensor([weight, float(not finished)], dtype=torch.float64)
        schedule = schedules.allreduce(head, self._comm.rank, self._comm.size)
        facts = (
            f"{self._what}.average(){self._since}: weights{self.alike()} "
            "(all ranks call it alike; one with fewer batches ends with finish())"
        )
        self._since = ""
        return start(schedule, self._comm, facts=facts, device=head.device)

    def _is_under_way(self) -> bool:
        return bool(self._launched)

    def _take(self) -> Arrived:
        assert self._head is not None
        came = self._comm.clock()
        weight, unfinished = self._head.wait().tolist()
        totals = [self._sums.total(each) for each in self._launched]
        launched, self._launched = self._launched, []  # only now, see `Averaging`
        now = self._comm.clock()
        self._waited += now - came
        works = [work for work in (self._head, *(each.work for each in launched)) if work is not None]
        self._under_way += max(work.ended or now for work in works) - self._began
        applied = bool(weight) and all(map(all_finite, totals))
        for each in launched:
            self._sums.feed_back(each, applied=applied)
        if not weight:
            return Arrived([], 0.0, int(unfinished))
        means = [each.part[self._anchor] + total / weight for each, total in zip(launched, totals, strict=True)]
        return Arrived(means, weight, int(unfinished))
