"""Dense exchanges: of gradients as they are, without residuals, and by a `DenseCompressor`, with them."""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, ClassVar, Self

import torch
from communicators import Bucket, Communicator, Schedule, comparable, schedules
from sparse_collectives import DENSE_WIRES, Algorithm, DenseReduction, check_options
from torch import Tensor

from data_parallel.lanes import ERROR_STATE, Lane, Saved, Scheme, Sending, State, in_units
from data_parallel.nonfinite import first_nonfinite


class DenseScheme(Scheme):
    """Scheme that sums dense gradients, half-precision ones in float32, and keeps nothing.

    wire: "bf16" or "fp16": gradients are divided by P, rounded, and summed in that; rounding errors are lost.
    """

    def open(self, bucket: Bucket, saved: Saved) -> Lane:
        """Opens a bucket's lane. TypeError for float64, which would lose most of its bits in half precision."""
        if DENSE_WIRES[self.wire] is not None and bucket.dtype == torch.float64:
            raise TypeError(f"wire={self.wire!r} was asked for, but gradients are float64: take wire='fp32'")
        return _DenseLane(self, bucket, saved)


class _DenseLane(Lane):
    def __init__(self, scheme: DenseScheme, bucket: Bucket, saved: Saved) -> None:
        super().__init__(bucket, saved)
        self._comm, self._dtype = scheme.comm, torch.promote_types(bucket.dtype, torch.float32)
        self._wire = DENSE_WIRES[scheme.wire]
        self._facts = f"dense(numel={bucket.numel}, {self._dtype}, wire={scheme.wire})"

    @property
    def _rounds_to(self) -> torch.dtype | None:
        return self._wire if self._comm.size > 1 else None

    def send(self, flat: Tensor, scale: float, unused: Sequence[slice]) -> Sending:
        """The sum of scaled gradients is the scaled sum, so the scale stays."""
        gradient = flat.to(self._dtype)
        given = gradient if self._rounds_to is None else (gradient / self._comm.size).to(self._rounds_to)
        schedule = schedules.allreduce(given, self._comm.rank, self._comm.size)
        return Sending(self._facts, schedule, flat, scale, unused, partial(first_nonfinite, gradient), summed=given)

    def values(self, result: Tensor) -> tuple[Tensor, Tensor]:
        """All of it is the total."""
        return result, result[:0]

    def receive(self, sending: Sending, result: Tensor) -> tuple[Tensor, Tensor]:
        """The mean."""
        mean = result.div_(self._comm.size) if self._rounds_to is None else result
        mean = mean.to(self._dtype).to(sending.flat.dtype)
        return mean, mean


@dataclass(frozen=True)
class DenseCompressor:
    """A sum over ranks that sends something of every element, in fewer bytes; what it leaves out waits in residuals.

        @dataclass(frozen=True)
        class Signs(DenseCompressor):
            name = "signs"
            per_unit: int = 1

            def schedule(self, accumulated, rank, size): ...

    A subclass is one compressor, its fields are the options with their defaults; it stands wherever the name of an
    algorithm does. `schedule` is all that it must have. An invalid option is a ValueError of its `__post_init__`.

    Attributes:
        name: Its name in facts, errors and checkpoints.
    """

    name: ClassVar[str] = ""

    def schedule(
        self, accumulated: Tensor, rank: int, size: int, state: State | None = None
    ) -> Schedule[DenseReduction[Tensor]]:
        """The rounds of one bucket on one rank, a generator, which returns the sum and what waits for the next step.

        Both are of the shape and dtype of `accumulated`. Over all ranks, accumulated = total + dropped, so that nothing
        is lost. Any rank's NaN or inf shows in the total, which has the same bits on every rank.

        Args:
            accumulated: Residual + gradient, 1-D, float32 or float64, in memory of this call; it is not written to.
            rank: This rank.
            size: P.
            state: Given where there is an `initial_state`; changed in place, as the last thing that a call does.
        """
        raise NotImplementedError

    def initial_state(self, numel: int) -> State | None:
        """The state before a bucket's first step, plain values and tensors; None for a compressor that keeps none.

        It takes the place of one that was saved of another bucket, whose tensors by element have other shapes. Calls
        that are counted as its "step" are compared among ranks.

        Args:
            numel: Elements of the bucket.
        """
        return None

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Checks that gradients of this type can be carried.

        Args:
            dtype: Of the parameters.

        Raises:
            TypeError: They cannot.
        """

    def scheme(self, comm: Communicator) -> Scheme:
        """The scheme that opens lanes of buckets; one that keeps state by parameter has its own.

        Args:
            comm: The ranks.
        """
        return CompressedScheme(comm, self)

    @property
    def options(self) -> dict[str, Any]:
        """Its own settings."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    @property
    def settings(self) -> list[str]:
        """The options as text, which all ranks must share."""
        return [f"{key}={comparable(value)}" for key, value in self.options.items()]

    def given(self, options: Mapping[str, Any] | None) -> Self:
        """The same compressor with these options, in the types of their defaults.

        Args:
            options: By name.

        Raises:
            TypeError: No dict, or a value of another type than the default.
            ValueError: An unknown name, or a value that does not fit.
        """
        return self if options is None else replace(self, **check_options(self.name, self.options, options))


class CompressedScheme(Scheme):
    """Scheme of a `DenseCompressor`, with error feedback."""

    keeps = ERROR_STATE[:1]

    def __init__(self, comm: Communicator, compressor: DenseCompressor) -> None:
        super().__init__(comm, compressor)
        self.compressor = compressor

    def open(self, bucket: Bucket, saved: Saved) -> Lane:
        """Opens a bucket's lane."""
        self.compressor.check_dtype(bucket.dtype)
        return CompressedLane(self, bucket, saved)


class CompressedLane(Lane):
    """A bucket's residual, flat, in float32 (float64 for such gradients).

    Memory: 4 bytes a parameter, and as much again between an exchange and the end of a step that may be undone.
    """

    def __init__(self, scheme: CompressedScheme, bucket: Bucket, saved: Saved) -> None:
        super().__init__(bucket, saved)
        self._comm, self._compressor = scheme.comm, scheme.compressor
        first = scheme.compressor.initial_state(bucket.numel)
        if self.state is None or not fits(self.state, first, bucket.numel, scheme.name):
            self.state = first
        self.kept |= saved.error_state
        what = [f"numel={bucket.numel}", f"{torch.promote_types(bucket.dtype, torch.float32)}"]
        self._said = [*what, *scheme.settings]

    def send(self, flat: Tensor, scale: float, unused: Sequence[slice]) -> Sending:
        """Residual + gradient, in memory of its own; zeros where nothing takes part."""
        gradient = in_units(flat, scale)
        total = gradient.clone() if self.residual is None else self.residual + gradient
        for span in unused:
            total[span] = 0
        return Sending(self.facts(), self.schedule(total), flat, scale, unused, partial(first_nonfinite, total))

    def facts(self) -> str:
        """All that ranks must share in this step, as text."""
        return f"{self._compressor.name}({', '.join([*self._said, *Algorithm.age_of(self.state)])})"

    def schedule(self, accumulated: Tensor) -> Schedule[Any]:
        """Rounds of the compressor, which return something with `total` and `dropped`; TypeError for anything else."""
        name, version = self._compressor.name, accumulated._version
        kept = {} if self.state is None else {"state": self.state}
        rounds = self._compressor.schedule(accumulated, self._comm.rank, self._comm.size, **kept)
        if not isinstance(rounds, Generator):
            raise TypeError(f"the schedule of {name} is no generator: it takes a total over ranks by `yield from`")
        result = yield from rounds
        if not isinstance(result, DenseReduction):
            raise TypeError(f"{name} returned a {type(result).__name__}, expected a DenseReduction(total, dropped)")
        for what, given in (("total", result.total), ("dropped", result.dropped)):
            if not (isinstance(given, Tensor) and (given.shape, given.dtype) == (accumulated.shape, accumulated.dtype)):
                said = f"{given.dtype} of {tuple(given.shape)}" if isinstance(given, Tensor) else repr(given)
                expected = f"{accumulated.dtype} of {tuple(accumulated.shape)}"
                raise TypeError(f"{name} returned {said} as its {what}, expected {expected}, as accumulated")
        if accumulated._version != version:
            raise RuntimeError(
                f"{name} wrote to `accumulated`, of which errors tell what was not finite: write to a copy"
            )
        return result

    def values(self, result: Any) -> tuple[Tensor, Tensor]:
        """All of both."""
        return result.total, result.dropped

    def receive(self, sending: Sending, result: Any) -> tuple[Tensor, Tensor]:
        """The mean: scaled, and in the gradient's own dtype, which may overflow."""
        residual = result.dropped.detach().contiguous()
        if self.residual is not None and sending.unused:
            residual = residual.clone()  # the compressor may hold it, too
            for span in sending.unused:
                residual[span] += self.residual[span]
        self.kept["residuals"] = residual
        mean = (result.total.detach() / self._comm.size * sending.scale).to(sending.flat.dtype)
        return mean, mean


def fits(state: State, first: State | None, numel: int, name: str) -> bool:
    """Whether what a saved state has by element is of this bucket's; ValueError if it lacks a key of the first one."""
    first = first if isinstance(first, dict) else {}
    if lacking := sorted(first.keys() - state.keys()):
        raise ValueError(f"the state of {name} lacks {', '.join(lacking)}: was it saved by another version of it?")
    by_element = {key: kept for key, kept in first.items() if isinstance(kept, Tensor) and numel in kept.shape}
    shapes = ((kept.shape, state[key]) for key, kept in by_element.items())
    return all(isinstance(given, Tensor) and given.shape == shape for shape, given in shapes)
