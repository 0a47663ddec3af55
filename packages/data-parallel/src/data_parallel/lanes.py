"""Way of one bucket's gradients to their mean, and everything kept of it between steps: a `Lane`, opened by a `Scheme`.

A lane sends a gradient and receives the result; it owns the bucket's residual, velocity and algorithm state. After the
last bucket of a step each lane is committed, or rolled back to what it kept before the step, bit for bit.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from communicators import Bucket, Communicator, Schedule
from torch import Tensor

ERROR_STATE = ("residuals", "velocities")
"""Tensors that error feedback keeps of each parameter between steps."""

State = dict[str, Any]
"""State that an algorithm keeps of a bucket between steps: plain values and tensors."""


class Saved(NamedTuple):
    """State of a bucket from before its lane was opened, from which that goes on.

    key: name of its first parameter. error_state: flat tensors by the names of `ERROR_STATE`. state: the algorithm's.
    """

    key: str
    error_state: Mapping[str, Tensor]
    state: State | None


@dataclass(eq=False)
class Sending:
    """One gradient on its way to the mean.

    facts: what all ranks share, as text. schedule: rounds that carry it, read once. flat: the gradient, 1-D, in its own
    dtype, which the mean may overwrite. scale: its loss scale. unused: spans of it that take no part. suspect: returns
    the first element of which this rank gave something not finite, -1 if none. summed: tensor of which the result is
    the plain sum, where the transport's own allreduce may do as well. beside: rounds of another call at the same time;
    `Lane.receive` gets the results of both then.
    """

    facts: str
    schedule: Schedule[Any]
    flat: Tensor
    scale: float
    unused: Sequence[slice]
    suspect: Callable[[], int]
    summed: Tensor | None = None
    beside: Schedule[Any] | None = None


class Lane:
    """One bucket's lane.

    spans: those of the members in the flat tensor. state: the algorithm's; a schedule changes it in place. kept: flat
    tensors by the names of `ERROR_STATE`, replaced in a step, never written to.
    """

    def __init__(self, bucket: Bucket, saved: Saved) -> None:
        self.bucket, self.key, self.state, self.spans = bucket, saved.key, saved.state, spans_of(bucket)
        self.kept: dict[str, Tensor] = {}
        self._before: tuple[State | None, dict[str, Tensor]] | None = None

    @property
    def residual(self) -> Tensor | None:
        """Part of the gradients that was not sent yet, flat, even amid a step; None before there is any."""
        return self.kept.get("residuals")

    def begin(self) -> None:
        """Begins a step that may be undone."""
        self._before = copy.deepcopy(self.state), dict(self.kept)

    def send(self, flat: Tensor, scale: float, unused: Sequence[slice]) -> Sending:
        """Adds a gradient of loss scale `scale` to the residual, and prepares what is sent of it."""
        raise NotImplementedError

    def values(self, result: Any) -> tuple[Tensor, Tensor]:
        """Total values of a call, which show any rank's NaN or inf, and dropped values, which only this rank keeps."""
        raise NotImplementedError

    def receive(self, sending: Sending, result: Any) -> tuple[Tensor, Tensor]:
        """The mean in the gradient's form, and the part of it that may be nonzero; keeps what was dropped."""
        raise NotImplementedError

    def commit(self) -> None:
        """Ends a step that stands."""
        self._before = None

    def rollback(self) -> None:
        """Ends a step that does not: everything is as it was at `begin`, bit for bit."""
        if self._before is not None:
            (self.state, self.kept), self._before = self._before, None

    def error_state(self) -> dict[str, Tensor]:
        """Flat tensors by the names of `ERROR_STATE`, between steps: references."""
        return self.kept


class Scheme:
    """How gradients become means: opens the lanes of buckets, and owns what these share.

    Attributes:
        comm: The ranks.
        name: Name of the algorithm, which is an `Algorithm` or a `DenseCompressor`, in facts, errors and checkpoints.
        settings: Its options, as text that all ranks must share.
        wire: Encoding of the values.
        selects: Whether entries are selected, as many as the compressor says.
        keeps: Those of `ERROR_STATE` that lanes keep.
    """

    keeps: Sequence[str] = ()

    def __init__(self, comm: Communicator, algorithm: Any, *, selects: bool = False, wire: str = "fp32") -> None:
        self.comm, self.name, self.settings = comm, str(algorithm.name), list[str](algorithm.settings)
        self.selects, self.wire = selects, wire

    @property
    def dense_steps_left(self) -> int | None:
        """Number of first steps to come that are summed dense, so that they save nothing; None without such steps."""
        return None

    def open(self, bucket: Bucket, saved: Saved) -> Lane:
        """Opens a bucket's lane, which goes on from what was saved. TypeError for a dtype that it cannot carry."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """State that lanes share, for a checkpoint, in plain values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads from another exchange's state. ValueError if it does not fit; nothing is changed then."""


def in_units(flat: Tensor, scale: float) -> Tensor:
    """Gradient divided by its loss scale, in float32 (float64 stays)."""
    gradient = flat.to(torch.promote_types(flat.dtype, torch.float32))
    return gradient if scale == 1.0 else gradient / scale


def spans_of(bucket: Bucket) -> list[slice]:
    """Span of each member in the flat tensor."""
    return [slice(*edge) for edge in pairwise(accumulate((shape.numel() for shape in bucket.shapes), initial=0))]


def unused_spans(spans: Sequence[slice], flat: Tensor) -> list[slice]:
    """Spans of members that are all zeros. For most others the first elements show that they are not."""
    if not flat.is_cpu:  # one look for all of them, because each waits for the device
        used = torch.stack([flat[span].any() for span in spans]).tolist()
        return [span for span, any_used in zip(spans, used, strict=True) if not any_used]
    return [span for span in spans if not flat[span][:64].any() and not flat[span].any()]


def empty_like(bucket: Bucket) -> Tensor:
    """Flat tensor in which a bucket accumulates: float32, or the bucket's dtype where that is wider."""
    dtype = torch.promote_types(bucket.dtype, torch.float32)
    return torch.empty(bucket.numel, dtype=dtype, device=bucket.device)
