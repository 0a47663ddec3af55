"""Outer steps by rounds that do not wait for the last rank, with any engine of numbered sums as an argument."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, TypeAlias, cast

from communicators import CollectiveError, Communicator
from torch import Tensor

from local_sgd.options import Options
from local_sgd.outer import Outer
from local_sgd.parts import Part


class Round(Protocol):
    """One round, alike on all ranks, to be applied once and in order, such as `partial_collectives.PartialResult`.

    total: the sum of the contributions, weights included. weight: the sum of the weights. round: its number.
    nonfinite: the ranks that contributed NaN or inf.
    """

    @property
    def total(self) -> Tensor | list[Tensor]: ...

    @property
    def weight(self) -> float: ...

    @property
    def round(self) -> int: ...

    @property
    def nonfinite(self) -> tuple[int, ...]: ...


class Rounds(Protocol):
    """Sums of the ranks' contributions, in rounds that every rank gets once, in order, bit for bit; nothing is lost.

    `partial_collectives.PartialAllreduce` is one.
    """

    def allreduce(self, tensor: Sequence[Tensor], /, *, weight: float = 1.0) -> Iterable[Round]:
        """Contributes weight · tensor; returns the rounds that are over, at least one."""

    def synchronize(self) -> Iterable[Round]:
        """Meets all ranks that have more to contribute; returns the rounds until then."""

    def finish(self) -> Iterable[Round]:
        """Ends this rank's contributions; returns the remaining rounds."""

    def close(self) -> None:
        """Closes, together with all other ranks."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        """Tells the others of an error."""

    def state_dict(self) -> dict[str, Any]:
        """Contributions in no round yet, rounds that were not returned, and the position in the rounds."""

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Restores a state; all ranks call it."""


class MakeRounds(Protocol):
    """Makes `Rounds` for tensors of these sizes, on all ranks."""

    def __call__(self, like: list[Tensor], comm: Communicator, /) -> Rounds: ...


RoundsOption: TypeAlias = MakeRounds | None


class OuterRounds:
    """Contributes the change of a block, Δ = z − x, to a round; every round is one step of the outer optimizer.

        give Δ;   for every round that is over:  z ← outer(z, total / m);   then  x ← z

    A late Δ goes into a later round, as one more summand. m is the number of ranks; weighted: total is divided by its
    weight. z is the same on all ranks after the same number of rounds.
    """

    def __init__(
        self, parts: Sequence[Part], outer: Outer, make: MakeRounds, comm: Communicator, *, weighted: bool, what: str
    ) -> None:
        self._parts, self._outer, self._size = parts, outer, comm.size
        self._weighted, self._what = weighted, what
        self._rounds, self._ended = make([part["anchor"] for part in parts], comm), False

    def give(self, weight: float) -> None:
        """Contributes the change of a block that has ended."""
        changes = [part["anchor"] - part.gather() for part in self._parts]
        self._apply(self._rounds.allreduce(changes, weight=weight))

    def synchronize(self) -> None:
        """Meets all ranks that have more blocks; then z is the same on all."""
        self._apply(self._rounds.synchronize())

    def finish(self) -> None:
        """Takes part until no rank has another block, then closes the rounds; once."""
        if not self._ended:
            self._apply(self._rounds.finish())
            self._rounds.close()
            self._ended = True

    def give_up(self, error: BaseException) -> None:
        """Tells the other ranks of an error."""
        self._rounds.__exit__(type(error), error, error.__traceback__)

    def state_dict(self) -> dict[str, Any]:
        """State of the rounds."""
        return self._rounds.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the rounds."""
        self._rounds.load_state_dict(state)

    def _apply(self, rounds: Iterable[Round]) -> None:
        for one in rounds:
            if one.nonfinite:
                raise CollectiveError(
                    f"{self._what}: NaN or inf in the parameters of ranks {list(one.nonfinite)}, seen in round "
                    f"{one.round}: lower the learning rate there, clip gradients, or go back to a checkpoint"
                )
            if self._weighted and not one.weight:  # on all ranks: there is nothing to take a mean of
                continue
            divisor = one.weight if self._weighted else self._size
            totals = [one.total] if isinstance(one.total, Tensor) else one.total
            for part, total in zip(self._parts, totals, strict=True):
                self._outer.give(part, (total / divisor).to(part["anchor"].device))
            self._outer.step()
        for part in self._parts:
            part.put(part["anchor"])


def checked_rounds(make: object, compress: object, options: Options, *, levels: bool) -> RoundsOption:
    """Maker of rounds, if an allreduce comes without compress; an error for options that rounds exclude."""
    if make is None or compress is not None:
        return None
    if not callable(make):
        raise TypeError(
            f"allreduce is {make!r}, expected what makes rounds, allreduce(like, comm), such as "
            "functools.partial(PartialAllreduce, quorum='majority'); or, with compress, the sum of what it sends"
        )
    waits = [f"{name}={options[name]!r}" for name in ("buffers", "inner_state") if options.get(name, "keep") != "keep"]
    waits += ["native=True"] * bool(options.get("native")) + ["two levels"] * levels
    if waits:
        raise ValueError(f"{', '.join(waits)}: all ranks wait for each other there, which rounds do not: leave it out")
    return cast(MakeRounds, make)
