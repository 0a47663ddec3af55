"""PowerSGD: of every matrix of gradients a few singular directions travel, by power iteration from step to step.

Vogels, Karimireddy & Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization",
NeurIPS 2019, algorithms 1 and 2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from communicators import Bucket, Communicator, Schedule, schedules
from sparse_collectives.algorithms.dense_sum import Dense
from sparse_collectives.traffic import Traffic, together
from torch import Tensor

from data_parallel.lanes import Lane, Saved, Scheme, Sending, spans_of
from data_parallel.schemes.dense import CompressedLane, CompressedScheme, DenseCompressor
from data_parallel.schemes.gram_schmidt import orthonormal, outer_sum

Shapes = Sequence[torch.Size]


@dataclass(frozen=True)
class PowerSGD(DenseCompressor):
    """Low-rank approximations of gradients, with error feedback.

    For every matrix M (n × m) of a bucket, with this rank's residual E:

        M ← E + gradient;  P ← Σ M Q over ranks;  P̂ ← orthonormal(P);  Q_own ← Mᵀ P̂;  Q ← Σ Q_own
        mean ← P̂ Qᵀ / ranks;  E ← M − P̂ Q_ownᵀ

    A tensor of more than two dimensions is a matrix of its first by the others. Vectors, and matrices whose P and Q
    would have as many elements as they have, are summed dense, in the same message as the bucket's P's.

    Differs from the paper: Q is orthonormalised before it is used, as torch's powerSGD_hook does, so that P keeps
    within the gradients' range; a direction that has died out (its gradients were zero) begins anew.

    Residuals need no agreement about Q: with different Q's on a rank, nothing is lost either.

    rank: r, columns of P and Q. dense_steps: number of first steps, of those that stand, that are summed dense, as in
    torch's hook before its start_powerSGD_iter: gradients change fastest then, and the last step's directions fit
    least. 100 are few of a training of thousands; of a shorter one a tenth of the steps is enough (see
    docs/algorithms/powersgd.md).
    """

    name = "powersgd"
    rank: int = 2
    dense_steps: int = 100

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank is {self.rank}, expected 1 or more columns of P and Q; published: 1 to 4")
        if self.dense_steps < 0:
            raise ValueError(f"dense_steps is {self.dense_steps}, expected 0 or more first steps that are summed dense")

    def scheme(self, comm: Communicator) -> Scheme:
        """The scheme, which keeps directions by matrix."""
        return _PowerSGDScheme(comm, self)


class _PowerSGDScheme(CompressedScheme):
    """Directions belong to matrices, so they outlive their bucket, and serve any number of ranks.

    directions: Q by the matrix's position in the optimizer's list, the same on all ranks. stood: steps that did.
    """

    def __init__(self, comm: Communicator, settings: PowerSGD) -> None:
        super().__init__(comm, settings)
        self.rank, self.dense_steps = settings.rank, settings.dense_steps
        self.directions: dict[int, Tensor] = {}
        self.stood = 0

    @property
    def dense_steps_left(self) -> int:
        """Number of dense steps still to come."""
        return max(0, self.dense_steps - self.stood)

    def open(self, bucket: Bucket, saved: Saved) -> Lane:
        """Opens a bucket's lane; new matrices get random directions, the same on every rank."""
        return _PowerSGDLane(self, bucket, saved)

    def state_dict(self) -> dict[str, Any]:
        """Directions by the matrix's position, as numbers, which torch.distributed.checkpoint loads as a whole.

        And how many steps have stood.
        """
        directions = [(member, str(q.dtype)[6:], q.tolist()) for member, q in sorted(self.directions.items())]
        return {"directions": directions, "stood": self.stood}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads directions. ValueError for those of another r."""
        saved = state.get("directions", ())  # absent from another algorithm's state
        loaded = {member: torch.tensor(q, dtype=getattr(torch, dtype)) for member, dtype, q in saved}
        if wrong := sorted({q.shape[1] for q in loaded.values()} - {self.rank}):
            raise ValueError(f"the state was saved with rank={wrong[0]}, but this is powersgd with rank={self.rank}")
        super().load_state_dict(state)
        older = self.dense_steps if saved else 0  # a state from before there were dense steps
        self.directions, self.stood = loaded, state.get("stood", older)


class _PowerSGDLane(CompressedLane):
    """A bucket some of whose members are matrices that travel in low rank."""

    def __init__(self, scheme: _PowerSGDScheme, bucket: Bucket, saved: Saved) -> None:
        super().__init__(scheme, bucket, saved)
        self._scheme, self._step, self._new = scheme, 0, dict[int, Tensor]()
        self._low_rank = self._layout = Layout.of(bucket, scheme.rank)
        self._dense = Layout.of(bucket, None)
        self._starts: dict[int, Tensor] = {}
        dtype = torch.promote_types(bucket.dtype, torch.float32)
        for member, (_, length) in self._low_rank.matrices.items():
            generator = torch.Generator().manual_seed(member)
            [start] = orthonormal([torch.randn(length, scheme.rank, generator=generator)])
            known = scheme.directions.get(member, start)
            if len(known) != length:
                raise ValueError(f"parameter {member}: directions of {len(known)} elements were loaded, not {length}")
            self._starts[member] = start.to(bucket.device, dtype)
            scheme.directions[member] = known.to(bucket.device, dtype)

    def send(self, flat: Tensor, scale: float, unused: Sequence[slice]) -> Sending:
        """Sends the accumulated gradient along the last step's directions; dense in the first steps."""
        self._step = self._scheme.stood
        self._layout = self._dense if self._scheme.dense_steps_left else self._low_rank
        sending = super().send(flat, scale, unused)
        sending.facts = self._layout.facts
        return sending

    def schedule(self, accumulated: Tensor) -> Schedule[LowRank]:
        """Two sums; a direction that has become zero starts anew, without waiting for a GPU."""
        known = {member: self._new.get(member, self._scheme.directions[member]) for member in self._layout.matrices}
        directions = [torch.where(q.any(0), q, self._starts[member]) for member, q in known.items()]
        return low_rank_sum(self._layout, accumulated, directions, self._comm)

    def receive(self, sending: Sending, result: LowRank) -> tuple[Tensor, Tensor]:
        """The mean; keeps the directions for the next step."""
        self._new.update(zip(self._layout.matrices, orthonormal(result.q), strict=True))
        return super().receive(sending, result)

    def commit(self) -> None:
        """Keeps this step's residual and directions."""
        super().commit()
        self._scheme.directions.update(self._new)
        self._scheme.stood = max(self._scheme.stood, self._step + 1)
        self._new = {}

    def rollback(self) -> None:
        """Restores the residual and directions from before the step."""
        super().rollback()
        self._new = {}


@dataclass(frozen=True, eq=False)
class Layout:
    """Layout of a bucket, decided by shapes alone.

    low_rank: by member, whether it is a matrix. matrices: rows and columns, by position in the optimizer's list. spans:
    those of dense members.
    """

    bucket: Bucket
    low_rank: list[bool]
    matrices: dict[int, tuple[int, int]]
    spans: list[slice]
    facts: str

    @classmethod
    def of(cls, bucket: Bucket, columns: int | None) -> Layout:
        """Layout with r columns of P and Q; None: all of it is dense."""
        low_rank = [columns is not None and is_matrix(shape, columns) for shape in bucket.shapes]
        members = zip(bucket.members, bucket.shapes, low_rank, strict=True)
        dtype, sizes = torch.promote_types(bucket.dtype, torch.float32), powersgd_elements(bucket.shapes, columns)
        facts = f"powersgd(rank={columns}, numel={bucket.numel}, {dtype}, elements={sizes})"
        matrices = {member: rows_and_columns(shape) for member, shape, found in members if found}
        spans = [span for span, found in zip(spans_of(bucket), low_rank, strict=True) if not found]
        return cls(bucket, low_rank, matrices, spans, facts)

    def views(self, flat: Tensor) -> list[Tensor]:
        """The matrices, in their tensors' shapes."""
        return [view for view, found in zip(self.bucket.views(flat), self.low_rank, strict=True) if found]


class LowRank(NamedTuple):
    """Result of `low_rank_sum`; q: Σ Q by matrix."""

    total: Tensor
    dropped: Tensor
    q: list[Tensor]


def low_rank_sum(
    layout: Layout, accumulated: Tensor, directions: Sequence[Tensor], comm: Communicator
) -> Schedule[LowRank]:
    """Two sums for a whole bucket: all P and what is dense, then all Q. directions: (m, r) by matrix."""
    views, dense = layout.views(accumulated), [accumulated[span] for span in layout.spans]
    matrices = [view.reshape(len(view), -1) for view in views]
    own_p = [matrix @ q for matrix, q in zip(matrices, directions, strict=True)]
    first = yield from schedules.allreduce(_joined(accumulated[:0], *own_p, *dense), comm.rank, comm.size)
    sums = first.split_with_sizes([each.numel() for each in (*own_p, *dense)])
    total, dropped = torch.empty_like(accumulated), torch.zeros_like(accumulated)
    for span, found in zip(layout.spans, sums[len(own_p) :], strict=True):
        total[span] = found
    if not matrices:
        return LowRank(total, dropped, [])
    p = orthonormal([flat.view(own.shape) for flat, own in zip(sums, own_p, strict=False)])
    own_q = [matrix.T @ basis for matrix, basis in zip(matrices, p, strict=True)]
    second = yield from schedules.allreduce(_joined(*own_q), comm.rank, comm.size)
    flats = second.split_with_sizes([own.numel() for own in own_q])
    q = [flat.view(own.shape) for flat, own in zip(flats, own_q, strict=True)]
    for i, (summed, rest) in enumerate(zip(layout.views(total), layout.views(dropped), strict=True)):
        summed.copy_(outer_sum(p[i], q[i]).view(summed.shape))
        torch.sub(views[i], (p[i] @ own_q[i].T).view(rest.shape), out=rest)  # this rank's own, in any order of sums
    return LowRank(total, dropped, q)


def powersgd_sent(
    rank: int, size: int, shapes: Shapes, columns: int | None, *, dtype: torch.dtype = torch.float32
) -> Traffic:
    """Exact traffic of a rank for a bucket of these shapes: two dense sums, or one without matrices.

    columns: r; None: in a step that is summed dense.
    """
    sums = [numel for i, numel in enumerate(powersgd_elements(shapes, columns)) if i == 0 or numel]
    return together(*(Dense().sent(rank, size, 0, numel, dtype) for numel in sums))


def powersgd_elements(shapes: Shapes, columns: int | None) -> tuple[int, int]:
    """Elements of the two sums of a bucket: Σ n·r and what is dense, Σ m·r; all of them in the first without r."""
    first = second = 0
    for shape in shapes:
        if columns is not None and is_matrix(shape, columns):
            n, m = rows_and_columns(shape)
            first, second = first + n * columns, second + m * columns
        else:
            first += shape.numel()
    return first, second


def is_matrix(shape: torch.Size, columns: int) -> bool:
    """Whether P and Q of it have fewer elements than it has: (n + m)·r < n·m."""
    if len(shape) < 2 or not shape.numel():
        return False
    n, m = rows_and_columns(shape)
    return (n + m) * columns < n * m


def rows_and_columns(shape: torch.Size) -> tuple[int, int]:
    """A tensor as a matrix: its first dimension by the others."""
    return shape[0], shape.numel() // shape[0]


def _joined(*tensors: Tensor) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])
