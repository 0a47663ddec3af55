"""Compression: ranks exchange the change since the last agreed model, rounded or sparse, with error feedback."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeAlias, runtime_checkable

import torch
from communicators import Communicator, schedules, start, tracing
from torch import Tensor

from local_sgd.averaging import Arrived, Averaging, all_finite
from local_sgd.parts import by_name, refuse_other_shapes
from local_sgd.rule import Part

BITS = {"int8": 8, "int4": 4, "int2": 2}


@runtime_checkable
class Sparsifier(Protocol):
    """Compressor with error feedback, such as `sparse_compress.ErrorFeedback`; every name has a residual of its own.

    Its law: what is sent, plus the residual afterwards, equals what was given, plus the residual before.
    """

    def compress(self, name: str, delta: Tensor, /) -> Any:
        """Selects what to send of a 1-D tensor plus the residual of that name; the residual keeps the rest."""

    def restore(self, name: str, dropped: Any, /) -> None:
        """Adds to the residual what a sum over ranks dropped; all that `compress` gave, if the sum is not applied."""

    def state_dict(self) -> dict[str, Any]:
        """All residuals."""

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Restores the residuals."""


Compress: TypeAlias = str | Sparsifier | None
Allreduce: TypeAlias = Callable[[Any, Communicator], Any]
"""allreduce(sent, comm): sum over ranks of what a `Sparsifier` sends, or a `Work` of it, which then runs while
`StreamingDiLoCo` computes. `.total` is dense, or has `to_dense()`; `.dropped` is for `Sparsifier.restore`, or None."""


@dataclass(frozen=True)
class Selected:
    """Vector to be summed: its part, what was given, and what is sent of it."""

    part: Part
    given: Tensor
    sent: Any


class ResidualSum(ABC):
    """Sum over ranks of parts, in fewer bytes, with a residual for each part. Its text is the same on every rank.

    Attributes:
        carries_nan: Whether a NaN reaches every rank through the sum itself.
        kind: Name in checkpoints.
        residuals: Residual of each part, by its id.
    """

    carries_nan: ClassVar[bool] = False
    kind: str

    def begin(self, parts: Sequence[Part], comm: Communicator, what: str) -> None:
        """Takes the parts, and begins their residuals; `what` names the algorithm in errors."""
        self._parts, self._comm, self._what = parts, comm, what
        self.residuals = {id(part): torch.zeros_like(part.gather()) for part in parts}

    @abstractmethod
    def select(self, part: Part, x: Tensor, weight: float) -> Selected:
        """Adds the part's residual to x, which it takes over, to be sent; weight: this rank's, 0 if it has finished."""

    @abstractmethod
    def launch(self, selected: Selected) -> Any:
        """Starts the sum of what was selected; again, where the group has changed."""

    def mean(self, selected: Selected, result: Any, weight: float) -> Tensor:
        """Mean over ranks as a vector, of their total weight."""
        if not hasattr(result, "total"):
            raise TypeError(
                f"allreduce returned a {type(result).__name__}, expected something with .total and .dropped"
            )
        dense: Tensor = result.total if isinstance(result.total, Tensor) else result.total.to_dense()
        given = selected.given
        if dense.numel() != given.numel():
            raise ValueError(f"allreduce gave a total of {dense.numel()} elements for a change of {given.numel()}")
        return dense.reshape(-1).to(given) / weight

    @property
    def residual_norm(self) -> float | None:
        """2-norm of all residuals; None where it is not known."""
        return norm(self.residuals.values())

    @abstractmethod
    def feed_back(self, selected: Selected, result: Any, *, applied: bool) -> None:
        """Updates the residual; if the total is not applied, the old one stays, and nothing is lost."""

    def state_dict(self) -> dict[str, Any]:
        """All residuals, by parameter."""
        return by_name(self._parts, [self.residuals[id(part)] for part in self._parts])

    def check(self, residuals: Mapping[str, Any]) -> None:
        """Raises ValueError for a state that does not fit."""
        refuse_other_shapes("residuals", residuals, self._parts)

    def load_state_dict(self, residuals: Mapping[str, Any]) -> None:
        """Restores residuals that `check` accepted."""
        self.residuals = {id(part): part.flat_of(residuals) for part in self._parts}


class RoundedSum(ResidualSum):
    """Sum over ranks rounded to 8, 4 or 2 bits an element (`quantised_allreduce`).

    Residuals hold the error of float64 in float32, too. A NaN reaches every rank, in its own block.
    """

    carries_nan = True
    kind = "rounded"

    def __init__(self, word: str) -> None:
        self._word, self._bits = word, BITS[word]

    def __repr__(self) -> str:
        return self._word

    def select(self, part: Part, x: Tensor, weight: float) -> Selected:
        x += self.residuals[id(part)]
        return Selected(part, x, x.float())

    def launch(self, selected: Selected) -> Any:
        x = selected.given
        facts = f"{self._what}.average() of {x.numel()} elements, {x.dtype} in {self._bits} bits"
        schedule = schedules.quantised_allreduce(selected.sent, self._comm.rank, self._comm.size, bits=self._bits)
        return start(schedule, self._comm, facts=facts, device=x.device)

    def feed_back(self, selected: Selected, result: Any, *, applied: bool) -> None:
        if applied:
            rounded_off = selected.given - selected.sent
            self.residuals[id(selected.part)] = rounded_off.add_(result.dropped)


class SparseSum(ResidualSum):
    """Sum over ranks by a given compressor, which keeps the residuals, and a given allreduce."""

    kind = "sparse"

    def __init__(self, sparsifier: Sparsifier, allreduce: Allreduce) -> None:
        self._sparsifier, self._allreduce = sparsifier, allreduce

    def __repr__(self) -> str:
        return type(self._sparsifier).__name__

    def begin(self, parts: Sequence[Part], comm: Communicator, what: str) -> None:
        """Notes the cut into vectors, of which the compressor keeps the residuals."""
        del what
        self._comm, self._cut = comm, [[list(part.names), part.bucket.numel] for part in parts]

    def select(self, part: Part, x: Tensor, weight: float) -> Selected:
        del weight
        with tracing.labelled("select"):
            return Selected(part, x, self._sparsifier.compress(part.names[0], x))

    def launch(self, selected: Selected) -> Any:
        return self._allreduce(selected.sent, self._comm)

    def feed_back(self, selected: Selected, result: Any, *, applied: bool) -> None:
        """Updates the residual; if the total is not applied, all that was sent goes back, and nothing is lost."""
        back = result.dropped if applied else selected.sent
        if back is not None:
            with tracing.labelled("restore"):
                self._sparsifier.restore(selected.part.names[0], back)

    @property
    def residual_norm(self) -> float | None:
        """2-norm of all residuals that the compressor saves under that name, tensors by name; else None."""
        held = self._sparsifier.state_dict().get("residuals")
        if not isinstance(held, Mapping) or not all(isinstance(one, Tensor) for one in held.values()):
            return None
        return norm(held.values())

    def state_dict(self) -> dict[str, Any]:
        """State of the compressor, and the number of its tensors, because a loader may leave some out.

        The cut is saved too: residuals are by part, because a compressor selects among all elements of one.
        """
        held = self._sparsifier.state_dict()
        return {"sparsifier": held, "tensors": _tensors(held), "cut": self._cut}

    def check(self, residuals: Mapping[str, Any]) -> None:
        """Raises ValueError for a state that does not fit."""
        if sorted(residuals["cut"]) != sorted(self._cut):
            raise ValueError(
                "the compressor's residuals are by vector, and those were cut otherwise: make the optimizer with the "
                f"same bucket_bytes and fragments; the state is of {_vectors(residuals['cut'])}, this of "
                f"{_vectors(self._cut)} elements"
            )
        if (found := _tensors(residuals["sparsifier"])) != residuals["tensors"]:
            raise ValueError(
                f"the compressor's state had {residuals['tensors']} tensors and has {found}: "
                "torch.distributed.checkpoint loads only what the state given to it holds; take a block of steps "
                "before, or load the whole file"
            )

    def load_state_dict(self, residuals: Mapping[str, Any]) -> None:
        self._sparsifier.load_state_dict(residuals["sparsifier"])


def compressed(compress: Compress, allreduce: Allreduce | None) -> ResidualSum | None:
    """Sum in fewer bytes that a user asked for; None where nothing is compressed.

    compress: "int8", "int4", "int2", a `Sparsifier`, which takes an allreduce, or None.

    Raises:
        TypeError: `compress` is of another type, or a compressor without an allreduce.
        ValueError: `compress` is another word, tentative, or has momentum, or there is an allreduce but no compressor.
    """
    plain, a_class = compress is None or isinstance(compress, str), isinstance(compress, type)
    if not (compress is None or compress in BITS if plain else isinstance(compress, Sparsifier) and not a_class):
        raise (ValueError if plain else TypeError)(
            f"compress is {compress!r}, expected None, one of {tuple(BITS)}, or a compressor with error feedback: "
            "compress(name, delta), restore(name, dropped), state_dict() and load_state_dict()"
        )
    if plain and allreduce is not None:
        raise ValueError(
            f"allreduce sums what a compressor sends, but compress is {compress!r}: leave it out; rounds do it "
            f"themselves: allreduce=partial(PartialAllreduce, compress={compress!r})"
        )
    if compress is None:
        return None
    if isinstance(compress, str):
        return RoundedSum(compress)
    if not callable(allreduce):
        raise TypeError(
            f"allreduce is {allreduce!r}, but compress is a compressor: give the sum of what it sends, "
            "allreduce(sent, comm), which returns .total and .dropped"
        )
    if getattr(compress, "tentative", False):
        raise ValueError(
            "compress has tentative=True, but its steps are never committed here, so that it could not be saved: "
            "leave tentative out; a mean that is not finite is undone without it"
        )
    if momentum := getattr(compress, "momentum", 0.0):
        raise ValueError(
            f"compress has momentum={momentum}, so that it sends each change several times over: leave momentum out, "
            "and give it to the inner or outer optimizer"
        )
    return SparseSum(compress, allreduce)


class CompressedAveraging(Averaging):
    """Computes z + Σ w·(x − z) / Σ w, the sum being compressed, with its residuals, and the weights w exact.

    z is the first anchor of each part, the same bits on all ranks. Residuals are in units of the sum. A rank of
    weight 0 sends its residual.
    """

    def __init__(self, comm: Communicator, what: str, parts: Sequence[Part], anchor: str, sums: ResidualSum) -> None:
        super().__init__(comm, what, native=False)
        self._parts, self._anchor, self._compressed = parts, anchor, sums

    def _give(self, vectors: Sequence[Tensor], weight: float, finished: bool) -> None:
        self._arrived, self._generation, self._given, spoilt = None, 0, [], False
        for part, x in zip(self._parts, vectors, strict=True):
            change = (x - part[self._anchor]).mul_(weight) if weight else torch.zeros_like(x)
            if not self._compressed.carries_nan and not all_finite(change):
                spoilt = True
                change.zero_()  # or it would stay in a residual
            self._given.append(self._compressed.select(part, change, weight))
        head = [math.nan if spoilt else weight, float(not finished)]
        self._head = torch.tensor(head, dtype=torch.float64, device="cpu")

    def _summed(self, carry: Callable[..., Any]) -> list[Any]:
        """Sum of the head and those of the parts, all of which are under way at once."""
        del carry
        sums = [self._compressed.launch(each) for each in self._given]
        schedule = schedules.allreduce(self._head, self._comm.rank, self._comm.size)
        return [start(schedule, self._comm, facts=self._facts(": weights"), device=self._head.device), *sums]

    def _taken(self, totals: list[Any]) -> Arrived:
        head, *results = totals
        weight, unfinished = head.tolist()
        given = zip(self._given, results, strict=True)
        changes = [self._compressed.mean(each, result, weight or 1.0) for each, result in given]
        applied = bool(weight) and all(map(all_finite, changes))
        for each, result in zip(self._given, results, strict=True):
            self._compressed.feed_back(each, result, applied=applied)
        if not weight:
            return Arrived([], 0.0, int(unfinished))
        means = [each.part[self._anchor] + change for each, change in zip(self._given, changes, strict=True)]
        return Arrived(means, weight, int(unfinished))


def norm(tensors: Iterable[Tensor]) -> float:
    """2-norm of all elements, added up in float64."""
    return math.hypot(*(float(torch.linalg.vector_norm(each, dtype=torch.float64)) for each in tensors))


def _vectors(cut: list[Any]) -> str:
    return ", ".join(f"{names} of {numel}" for names, numel in cut)


def _tensors(node: Any) -> int:
    if isinstance(node, Mapping):
        return sum(map(_tensors, node.values()))
    return int(isinstance(node, Tensor))
