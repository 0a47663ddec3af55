"""Mean over ranks of a few vectors, at once or while the caller computes; NaN and inf in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from communicators import CollectiveError, Communicator, Schedule, Work, allgather, allreduce, run, schedules, start
from torch import Tensor

from local_sgd.parts import by_name
from local_sgd.rule import Part


@dataclass
class Arrived:
    """Means over ranks, by weight.

    weight: sum over all ranks; at 0 no rank gave anything, and there is no mean: `means` is empty.
    unfinished: number of ranks that had not finished when they gave theirs; −1 while the means are under way, and are
    zeros. since: facts of that exchange, see `Averaging.now`.
    """

    means: list[Tensor]
    weight: float
    unfinished: int
    since: str = ""

    def state_dict(self, parts: Sequence[Part]) -> dict[str, Any]:
        """Means by parameter, zeros where there are none; weight and count."""
        means = self.means or [torch.zeros_like(part.gather()) for part in parts]
        facts = {"weight": self.weight, "unfinished": self.unfinished, "since": self.since}
        return {"means": by_name(parts, means), **facts}

    @staticmethod
    def of_state(state: Mapping[str, Any], parts: Sequence[Part]) -> Arrived:
        """Means that `state_dict` gave, in vectors again."""
        there = state["weight"] or state["unfinished"] < 0
        means = [part.flat_of(state["means"]) for part in parts] if there else []
        return Arrived(means, state["weight"], state["unfinished"], state["since"])


class Averaging:
    """Exchanges means; every vector is one message, with its rank's weight and whether that rank has finished.

    Sums go by our schedule, so that all worlds give the same bits; native: by the transport's own, equal within
    rounding; shares: of the ranks in the sums, see `by_rate_allreduce`. A launch that failed stays failed: every later
    use raises the same error.

    In an elastic group means are taken by all ranks or by none. What was launched in another group is summed again
    among the ranks of this one, with the same bits as if it had been launched there; newcomers give weight 0.

    ranks: number of ranks in the last means that were taken.
    call: what ranks call, for errors. alike: gives text that must be the same on all ranks each time, such as an outer
    optimizer's rates.
    """

    def __init__(
        self,
        comm: Communicator,
        what: str,
        *,
        native: bool,
        shares: Sequence[float] | None = None,
        call: str = "average",
    ) -> None:
        self._comm, self._what, self._native, self._call = comm, what, native, call
        self._allreduce: Callable[[Tensor, int, int], Schedule[Tensor]] = schedules.allreduce
        if shares is not None:
            self._allreduce = partial(schedules.by_rate_allreduce, shares=shares)
        self.alike: Callable[[], str] = str
        self._given: list[Any] = []  # payloads that were launched, and not taken yet
        self._sums: list[Any] = []  # of them, under way in that generation:
        self._generation = 0
        self.ranks = comm.first_size
        self._arrived: Arrived | None = None
        self._error: Exception | None = None
        self.waited = self.exchanging = self._began = 0.0
        self._since = ""

    def now(self, vectors: Sequence[Tensor], weight: float, *, finished: bool, since: str = "") -> Arrived:
        """Exchanges the vectors; returns the means as soon as all ranks have come. since: goes into the facts."""
        with self._keeping_errors():
            self._since = since
            self._give(vectors, weight, finished)
            return self._take()

    def launch(self, vectors: Sequence[Tensor], weight: float, *, finished: bool, since: str) -> None:
        """Starts the exchange of the vectors as they are now, of which it takes one copy. since: as in `now`."""
        with self._keeping_errors():
            self._since = since
            self._give(vectors, weight, finished)
            try:
                self._start(start)
            except CollectiveError:
                if not self._comm.elastic:  # there it is launched again when it is taken
                    raise

    def arrived(self, *, waits: bool = True) -> Arrived:
        """Waits for the last launch and returns its means, which stay until the next launch.

        waits: False: of means that nobody has taken yet it says only that they are under way.
        """
        if self._given and not waits:
            return Arrived([], 0.0, -1, self._since)
        with self._keeping_errors():
            if self._arrived is None:
                self._arrived = self._take()
        return self._arrived

    def wait(self) -> None:
        """Waits for the exchange under way, if there is one."""
        if self._given or self._error:
            self.arrived()

    def store(self, arrived: Arrived) -> None:
        """Stores means as if they had been launched last; an exchange under way is waited for, and forgotten.

        Means that are under way among others come here with the next use, to which this rank gives weight 0.
        """
        self.wait()
        self._arrived = arrived
        if arrived.unfinished < 0:
            self._since = arrived.since
            self._give(arrived.means, 0.0, False)

    def _give(self, vectors: Sequence[Tensor], weight: float, finished: bool) -> None:
        """Prepares what is summed, whatever the group."""
        self._arrived, self._generation = None, 0
        self._given = [_payload(x, weight, finished) for x in vectors]

    def _start(self, carry: Callable[..., Any]) -> None:
        """Starts the sums of what was given, in the present group; carry: `start`, or `run`, which waits for them."""
        self._began = self._comm.clock()
        self._sums = self._summed(carry)
        self._generation = self._comm.generation

    def _summed(self, carry: Callable[..., Any]) -> list[Any]:
        """Sums over ranks, or the works of them."""
        rank, size = self._comm.rank, self._comm.size
        if not self._native:
            sums = [(x, self._facts(f" of {x.numel() - 2} elements, {x.dtype}")) for x in self._given]
            carry = start if len(sums) > 1 else carry  # all are under way at once
            return [
                carry(self._allreduce(x, rank, size), self._comm, facts=facts, device=x.device) for x, facts in sums
            ]
        if facts := self._since + self.alike():  # the transport's sum agrees on its size alone
            run(schedules.barrier(rank, size), self._comm, facts=f"{self._what}{facts}")
        return [allreduce(x, self._comm) for x in self._given]

    def _awaited(self) -> tuple[list[Any], int]:
        """Sums of what was given, and the number of ranks; of what was started in another group nothing is used."""
        if self._generation != self._comm.generation:
            self._start(run)
        return [one.wait() if isinstance(one, Work) else one for one in self._sums], self._comm.size

    def _take(self) -> Arrived:
        """Waits for the sums, and returns the means that all ranks take."""
        came = self._comm.clock()
        totals, self.ranks = self._comm.atomic(self._awaited)
        now = self._comm.clock()
        self.waited += now - came
        ends = [one.ended or now for one in self._sums if isinstance(one, Work)]
        self.exchanging += max(ends, default=now) - self._began
        arrived = self._taken(totals)
        self._given, self._sums = [], []  # only now, so that an interrupted wait can be repeated
        return arrived

    def _taken(self, totals: list[Any]) -> Arrived:
        """Means of sums that all ranks have taken."""
        weight, unfinished = totals[0][-2:].tolist()
        means = [total[:-2].div_(total[-2]) for total in totals] if weight else []
        return Arrived(means, weight, int(unfinished))

    @contextmanager
    def _keeping_errors(self) -> Iterator[None]:
        """Keeps an error for good: a launch or a wait that failed half-way cannot go on."""
        if self._error is not None:
            raise self._error
        try:
            yield
        except Exception as error:
            self._error = error
            raise

    def _facts(self, of: str) -> str:
        return (
            f"{self._what}.{self._call}(){self._since}{of}{self.alike()} "
            "(all ranks call it alike; one with fewer batches ends with finish())"
        )


def _payload(x: Tensor, weight: float, finished: bool) -> Tensor:
    payload = torch.empty(x.numel() + 2, dtype=x.dtype, device=x.device)
    if weight:
        torch.mul(x, weight, out=payload[:-2])
    else:
        payload.zero_()
    payload[-2], payload[-1] = weight, float(not finished)
    return payload


def all_finite(x: Tensor) -> bool:
    """Whether all elements are finite: they are if their sum is, which takes one pass; else it may have overflowed."""
    return bool(torch.isfinite(x.sum())) or bool(torch.isfinite(x).all())


def refuse_nonfinite(parts: Sequence[Part], means: Sequence[Tensor], comm: Communicator, what: str) -> None:
    """Raises CollectiveError, alike on every rank, for means that are not finite; ranks hold the same means."""
    if all(map(all_finite, means)):
        return
    found = _nonfinite(parts, means)
    own = bool(_nonfinite(parts, [part.gather() for part in parts]))
    owns = comm.atomic(lambda: allgather(torch.tensor([int(own)], device="cpu"), comm))
    ranks = [rank for rank, theirs in enumerate(owns) if int(theirs)]
    if not ranks:
        raise CollectiveError(f"{what}: the sum over ranks overflows in {found[0]!r}: give smaller weights")
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    raise CollectiveError(
        f"{what}: the average is not finite in {found[0]!r}{more}; NaN or inf in the parameters of ranks {ranks}: "
        "nothing was applied; lower the learning rate there, clip gradients, or go back to a checkpoint"
    )


def _nonfinite(parts: Sequence[Part], flats: Sequence[Tensor]) -> list[str]:
    return [name for name, view in by_name(parts, flats).items() if not all_finite(view)]
