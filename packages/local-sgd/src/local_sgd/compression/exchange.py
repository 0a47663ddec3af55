"""The mean over ranks of how vectors changed since all agreed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from communicators import Communicator, Work, start
from communicators import dense_schedules as dense
from torch import Tensor

from local_sgd.compression.wires import Flight, Wire
from local_sgd.exchange import Arrived, Exchange
from local_sgd.nonfinite import all_finite
from local_sgd.parts import Part


class Compressed(Exchange):
    """z + Σ w·(x − z) / Σ w, where the sum travels as the wire has it, with its rests, and the weights w exactly.

    z is the first anchor of each part, the same bits on all ranks. Rests are in units of the sum. A rank of weight 0
    sends its rest.
    """

    def __init__(self, comm: Communicator, what: str, parts: Sequence[Part], anchor: str, wire: Wire) -> None:
        super().__init__(comm, what, native=False)
        self._parts, self._anchor, self._wire = parts, anchor, wire
        self._flights: list[Flight] = []
        self._head: Work[Tensor] | None = None
        self._began = 0.0

    def now(self, vectors: Sequence[Tensor], weight: float, *, finished: bool) -> Arrived:
        """See `Exchange.now`."""
        self.launch(vectors, weight, finished=finished)
        return self.arrived()

    def launch(self, vectors: Sequence[Tensor], weight: float, *, finished: bool) -> None:
        """See `Exchange.launch`. A sum that does not go on by itself is waited for here."""
        with self._keeping_errors():
            self._arrived, self._began = None, self._comm.clock()
            spoilt = False
            for part, x in zip(self._parts, vectors, strict=True):
                change = (x - part[self._anchor]).mul_(weight) if weight else torch.zeros_like(x)
                if not self._wire.carries_nan and not all_finite(change):
                    spoilt = True
                    change.zero_()  # or it would stay in a rest
                self._flights.append(self._wire.launch(part, change))
            self._head = self._start_head(float("nan") if spoilt else weight, finished)
            self._waited += self._comm.clock() - self._began

    def _start_head(self, weight: float, finished: bool) -> Work[Tensor]:
        head = torch.tensor([weight, float(not finished)], dtype=torch.float64)
        schedule = dense.allreduce(head, self._comm.rank, self._comm.size)
        facts = (
            f"{self._what}.average(){self._since}: weights{self.alike()} "
            "(all ranks call it alike; one with fewer batches ends with finish())"
        )
        self._since = ""
        return start(schedule, self._comm, facts=facts, device=head.device)

    def _is_under_way(self) -> bool:
        return bool(self._flights)

    def _take(self) -> Arrived:
        assert self._head is not None
        came = self._comm.clock()
        weight, unfinished = self._head.wait().tolist()
        totals = [self._wire.total(flight) for flight in self._flights]
        flights, self._flights = self._flights, []  # only now, see `Exchange`
        now = self._comm.clock()
        self._waited += now - came
        works = [work for work in (self._head, *(flight.work for flight in flights)) if work is not None]
        self._under_way += max(work.ended or now for work in works) - self._began
        applied = bool(weight) and all(map(all_finite, totals))
        for flight in flights:
            self._wire.settle(flight, applied=applied)
        if not weight:
            return Arrived([], 0.0, int(unfinished))
        means = [flight.part[self._anchor] + total / weight for flight, total in zip(flights, totals, strict=True)]
        return Arrived(means, weight, int(unfinished))
