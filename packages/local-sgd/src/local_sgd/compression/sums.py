"""Compressed sums of changes: rounded block by block, or sparse."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from communicators import Communicator, Work, schedules, start, tracing
from torch import Tensor

from local_sgd.compression.sparsifier import Allreduce, Sparsifier, Summed
from local_sgd.parts import Part


@dataclass
class Launched:
    """Vector under way: its part, what was given, what was sent, and the result."""

    part: Part
    given: Tensor
    sent: Any
    work: Work[Any] | None
    result: Any = None

    def wait(self) -> Any:
        """Waits for the result and returns it."""
        if self.work is not None:
            self.result = self.work.wait()
        return self.result


class CompressedSum(ABC):
    """Sums over ranks, a vector per part, each with its residual: what is not sent is added to what is sent next time.

    carries_nan: whether a NaN reaches every rank, in its own place or block.
    """

    carries_nan: ClassVar[bool]
    kind: ClassVar[str]

    @abstractmethod
    def launch(self, part: Part, x: Tensor) -> Launched:
        """Starts the sum of x plus the part's residual; takes x over."""

    @abstractmethod
    def total(self, launched: Launched) -> Tensor:
        """Waits for the sum and returns it."""

    @abstractmethod
    def feed_back(self, launched: Launched, *, applied: bool) -> None:
        """Updates the residual: if the total is not applied, all that was sent goes back, and nothing is lost."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """All residuals."""

    @abstractmethod
    def check(self, residuals: Mapping[str, Any]) -> None:
        """Raises ValueError for a state that does not fit."""

    @abstractmethod
    def load_state_dict(self, residuals: Mapping[str, Any]) -> None:
        """Restores residuals that `check` accepted."""


class RoundedSum(CompressedSum):
    """Rounds to 8 or 4 bits an element (`quantised_allreduce`). Residuals hold the error of float64 in float32, too."""

    carries_nan = True
    kind = "rounded"

    def __init__(self, parts: Sequence[Part], bits: int, comm: Communicator, what: str) -> None:
        self._parts, self._bits, self._comm, self._what = parts, bits, comm, what
        self._residuals = {id(part): torch.zeros_like(part.gather()) for part in parts}

    def launch(self, part: Part, x: Tensor) -> Launched:
        x += self._residuals[id(part)]
        single = x.float()
        facts = f"{self._what}.average() of {x.numel()} elements, {x.dtype} in {self._bits} bits"
        schedule = schedules.quantised_allreduce(single, self._comm.rank, self._comm.size, bits=self._bits)
        return Launched(part, x, single, start(schedule, self._comm, facts=facts, device=x.device))

    def total(self, launched: Launched) -> Tensor:
        rounded: schedules.Rounded = launched.wait()
        return rounded.total.to(launched.given.dtype)

    def feed_back(self, launched: Launched, *, applied: bool) -> None:
        if applied:
            rounded: schedules.Rounded = launched.wait()
            self._residuals[id(launched.part)] = (launched.given - launched.sent).add_(rounded.dropped)

    def state_dict(self) -> dict[str, Any]:
        """All residuals, by parameter."""
        return {name: view for part in self._parts for name, view in part.by_name(self._residuals[id(part)]).items()}

    def check(self, residuals: Mapping[str, Any]) -> None:
        saved, own = ({(name, tuple(t.shape)) for name, t in held.items()} for held in (residuals, self.state_dict()))
        if saved != own:
            raise ValueError(
                f"residuals: only the checkpoint, or only the model, has (name, shape) {sorted(saved ^ own)}"
            )

    def load_state_dict(self, residuals: Mapping[str, Any]) -> None:
        for name, view in self.state_dict().items():
            view.copy_(residuals[name])


class SparseSum(CompressedSum):
    """Sums with a given compressor and a given allreduce."""

    carries_nan = False
    kind = "sparse"

    def __init__(self, parts: Sequence[Part], sparsifier: Sparsifier, allreduce: Allreduce, comm: Communicator) -> None:
        self._cut = [[list(part.names), part.bucket.numel] for part in parts]
        self._sparsifier, self._allreduce, self._comm = sparsifier, allreduce, comm

    def launch(self, part: Part, x: Tensor) -> Launched:
        with tracing.labelled("select"):
            sent = self._sparsifier.compress(part.names[0], x)
        summed = self._allreduce(sent, self._comm)
        work = summed if isinstance(summed, Work) else None
        return Launched(part, x, sent, work, summed)

    def total(self, launched: Launched) -> Tensor:
        summed: Summed = launched.wait()
        total = summed.total if isinstance(summed.total, Tensor) else summed.total.to_dense()
        if total.numel() != launched.given.numel():
            raise ValueError(
                f"allreduce gave a total of {total.numel()} elements for a change of {launched.given.numel()}"
            )
        return total.reshape(-1).to(launched.given)

    def feed_back(self, launched: Launched, *, applied: bool) -> None:
        back = launched.result.dropped if applied else launched.sent
        if back is not None:
            with tracing.labelled("restore"):
                self._sparsifier.restore(launched.part.names[0], back)

    def state_dict(self) -> dict[str, Any]:
        """State of the compressor, and the number of its tensors, because a loader may leave some out.

        The cut is saved too: residuals are by part, because a compressor selects among all elements of one.
        """
        held = self._sparsifier.state_dict()
        return {"sparsifier": held, "tensors": _tensors(held), "cut": self._cut}

    def check(self, residuals: Mapping[str, Any]) -> None:
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


def _vectors(cut: list[Any]) -> str:
    return ", ".join(f"{names} of {numel}" for names, numel in cut)


def _tensors(node: Any) -> int:
    if isinstance(node, Mapping):
        return sum(map(_tensors, node.values()))
    return int(isinstance(node, Tensor))
