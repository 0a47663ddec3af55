"""Outer steps by rounds that do not wait for the last rank, with any engine of numbered sums as an argument."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import torch
from communicators import CollectiveError, Communicator
from torch import Tensor

from local_sgd.driver import Driver
from local_sgd.outer import OuterStep
from local_sgd.settings import Settings

MakeRounds: TypeAlias = Callable[[list[Tensor], Communicator], Any]
"""allreduce(like, comm): makes the rounds of tensors of these sizes, on all ranks, such as a `PartialAllreduce`.

Rounds sum what ranks contribute; every rank gets every round once, in order, bit for bit, and nothing is lost:

- allreduce(tensors, weight=…) contributes weight · tensors; returns the rounds that are over, at least one;
- synchronize() meets all ranks that have more to contribute; returns the rounds until then;
- finish() ends this rank's contributions; returns the remaining rounds; close() closes, together with all others;
- __exit__(kind, error, trace) tells the others of an error;
- state_dict() gives contributions in no round yet, rounds that were not returned, and the position in the rounds;
  load_state_dict(state), which all ranks call, restores it.

A round, alike on all ranks, such as `PartialResult`, has `total`, the sum of the contributions, weights included;
`weight`, the sum of the weights; `round`, its number; `nonfinite`, the ranks that contributed NaN or inf.
"""


class OuterRounds(Driver):
    """Contributes the change of a block, Δ = z − x, to a round; every round is one step of the outer optimizer.

        give Δ;   for every round that is over:  z ← outer(z, total / m);   then  x ← z

    A late Δ goes into a later round, as one more summand. m is the number of ranks; weighted: total is divided by its
    weight. z is the same on all ranks after the same number of rounds.
    """

    rule: OuterStep
    inelastic = "the rounds of allreduce= have their own way to go on without a rank: leave allreduce or Elastic out"

    def __init__(self, make: MakeRounds | Any, settings: Settings, *, levels: bool) -> None:
        super().__init__()
        if not callable(make):
            raise TypeError(
                f"allreduce is {make!r}, expected what makes rounds, allreduce(like, comm), such as "
                "functools.partial(PartialAllreduce, quorum='majority'); or, with compress, the sum of what it sends"
            )
        policies = {"buffers": settings.get("buffers", "keep"), "inner_state": settings.get("inner_state", "keep")}
        waits = [f"{name}={policy!r}" for name, policy in policies.items() if policy != "keep"]
        waits += ["native=True"] * bool(settings.get("native")) + ["shares"] * (settings.get("shares") is not None)
        waits += ["two levels"] * levels
        if waits:
            raise ValueError(
                f"{', '.join(waits)}: all ranks wait for each other there, which rounds do not: leave it out"
            )
        self._make, self._ended = make, False

    def connect(self) -> None:
        """Begins the outer optimizer, and makes the rounds, which are all that is exchanged."""
        super().connect()
        self.needs.append("rounds")
        try:
            self._rounds = self._make([part["anchor"] for part in self.parts], self.comm)
        except (AttributeError, TypeError) as error:
            error.add_note(
                "without compress, allreduce makes rounds; a sum of what a compressor sends goes with compress"
            )
            raise

    def count(self, weight: float) -> None:
        """Counts a step; contributes the change of a block that has ended."""
        if self.block.count(weight):
            self.next_boundary(self.fragments[0].averaging)
            self._give(self.own_weight(self.block))
            self.block.end()

    def end(self, *, most: int | None) -> None:
        """Takes part until no rank has another block (finish, final), or meets all that have more (drain)."""
        self.next_boundary(self.fragments[0].averaging)
        if weight := self.own_weight(self.block):
            self._give(weight)
        if most is not None:
            self._apply(self._rounds.synchronize())
        elif not self._ended:
            self._apply(self._rounds.finish())
            self._rounds.close()
            self._ended = True
        self.block.end()
        self.drained = True
        self.owner.end_steps()

    def depart(self) -> None:
        """Leaves the drained state before a step; parameters loaded since then are refused."""
        if self.drained and any(not torch.equal(part["anchor"], part.gather()) for part in self.parts):
            raise RuntimeError(
                "the model has other weights than those that its ranks ended with, which the rounds of allreduce= "
                "do not compare: load weights on all ranks before the DiLoCo is made"
            )
        self.drained = False

    def models(self, comm: Communicator) -> list[Tensor]:
        """Anchors, once all ranks have applied the same rounds."""
        if not self.drained:
            raise RuntimeError("averaged_model(): ranks may have applied unlike numbers of rounds: drain() first")
        return self.anchors()

    def give_up(self, error: BaseException) -> None:
        """Tells the other ranks of an error."""
        self._rounds.__exit__(type(error), error, error.__traceback__)

    def state_dict(self, *, waits: bool = True) -> dict[str, Any]:
        """State of the rounds besides."""
        del waits
        return {"rounds": self._rounds.state_dict(), **super().state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the rounds besides; nothing is in those of a drained state."""
        super().load_state_dict(state)
        if not state["drained"]:
            self._rounds.load_state_dict(state["rounds"])

    def _give(self, weight: float) -> None:
        changes = [part["anchor"] - part.gather() for part in self.parts]
        self._apply(self._rounds.allreduce(changes, weight=weight))

    def _apply(self, rounds: Iterable[Any]) -> None:
        for one in rounds:
            if one.nonfinite:
                raise CollectiveError(
                    f"{self.what}: NaN or inf in the parameters of ranks {list(one.nonfinite)}, seen in round "
                    f"{one.round}: lower the learning rate there, clip gradients, or go back to a checkpoint"
                )
            if self._weighted and not one.weight:  # on all ranks: there is nothing to take a mean of
                continue
            divisor = one.weight if self._weighted else self.comm.size
            totals = [one.total] if isinstance(one.total, Tensor) else one.total
            deltas = [(t / divisor).to(part["anchor"].device) for part, t in zip(self.parts, totals, strict=True)]
            self.rule.step(self.parts, deltas)
        self.put(self.parts, (part["anchor"] for part in self.parts))
