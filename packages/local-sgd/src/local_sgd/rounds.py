"""Outer steps by rounds that do not wait for the last rank: any engine of numbered sums, given as an argument."""

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

    total: the sum of what was contributed, weights included. weight: the sum of the weights. round: its number.
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
    """Sums of what ranks give, in rounds that every rank gets once, in order, with the same bits; nothing is lost.

    `partial_collectives.PartialAllreduce` is one.
    """

    def allreduce(self, tensor: Sequence[Tensor], /, *, weight: float = 1.0) -> Iterable[Round]:
        """Gives weight · tensor; the rounds that are over, at least one."""

    def synchronize(self) -> Iterable[Round]:
        """Meets all ranks that have more to give; the rounds until then."""

    def finish(self) -> Iterable[Round]:
        """This rank has no more to give; the rest of the rounds."""

    def close(self) -> None:
        """With all other ranks."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        """After an error: tells the others."""

    def state_dict(self) -> dict[str, Any]:
        """What is in no round yet, rounds that were not returned, and where the rounds stand."""

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Goes on there; all ranks do."""


class MakeRounds(Protocol):
    """Makes `Rounds` for tensors of these sizes, on all ranks."""

    def __call__(self, like: list[Tensor], comm: Communicator, /) -> Rounds: ...


RoundsOption: TypeAlias = MakeRounds | None


class OuterRounds:
    """What a block has changed, Δ = z − x, is given to a round; every round is one step of the outer optimizer.

        give Δ;   for every round that is over:  z ← outer(z, total / m);   then  x ← z

    A Δ that is late goes into a later round, of which it is one summand more. m is the number of ranks; weighted: total
    is divided by its weight. z is the same on all ranks after as many rounds.
    """

    def __init__(
        self, parts: Sequence[Part], outer: Outer, make: MakeRounds, comm: Communicator, *, weighted: bool, what: str
    ) -> None:
        self._parts, self._outer, self._size = parts, outer, comm.size
        self._weighted, self._what = weighted, what
        self._rounds, self._ended = make([part["anchor"] for part in parts], comm), False

    def give(self, weight: float) -> None:
        """The end of a block."""
        changes = [part["anchor"] - part.gather() for part in self._parts]
        self._apply(self._rounds.allreduce(changes, weight=weight))

    def synchronize(self) -> None:
        """All ranks that have more blocks; then z is the same on all."""
        self._apply(self._rounds.synchronize())

    def finish(self) -> None:
        """Takes part until no rank has a block, and lets go of what the rounds hold; once."""
        if not self._ended:
            self._apply(self._rounds.finish())
            self._rounds.close()
            self._ended = True

    def give_up(self, error: BaseException) -> None:
        """Tells the others."""
        self._rounds.__exit__(type(error), error, error.__traceback__)

    def state_dict(self) -> dict[str, Any]:
        """See `Rounds.state_dict`."""
        return self._rounds.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Rounds.load_state_dict`."""
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
    """The maker where there is one: an allreduce without compress. ValueError for what rounds do not go with."""
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
