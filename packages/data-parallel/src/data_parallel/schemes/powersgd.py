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
from replicas import check_like
from sparse_collectives import ALGORITHMS, Traffic
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
        self.rank, self.dense_steps, self.stood = settings.rank, settings.dense_steps, 0
        self.directions: dict[int, Tensor] = {}

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
        check_like({"stood": 0, **state}, {"stood": 0}, self.name)
        dtypes = {"float32": torch.float32, "float64": torch.float64}
        loaded = {member: torch.tensor(q, dtype=dtypes[dtype], device="cpu") for member, dtype, q in saved}
        if wrong := sorted({q.shape[1] for q in loaded.values()} - {self.rank}):
            raise ValueError(f"the state was saved with rank={wrong[0]}, but this is powersgd with rank={self.rank}")
        self.directions, self.stood = loaded, state.get("stood", 0)


class _PowerSGDLane(CompressedLane):
    """A bucket some of whose members are matrices that travel in low rank."""

    def __init__(self, scheme: _PowerSGDScheme, bucket: Bucket, saved: Saved) -> None:
        super().__init__(scheme, bucket, saved)
        self._scheme, self._step, self._new = scheme, 0, dict[int, Tensor]()
        self._columns: int | None = None
        self._starts: dict[int, Tensor] = {}
        self._dtype = dtype = torch.promote_types(bucket.dtype, torch.float32)
        for i in matrices_of(bucket.shapes, scheme.rank):
            member, (_, length) = bucket.members[i], rows_and_columns(bucket.shapes[i])
            generator = torch.Generator().manual_seed(member)
            [start] = orthonormal([torch.randn(length, scheme.rank, generator=generator, device="cpu")])
            known = scheme.directions.get(member, start)
            if len(known) != length:
                raise ValueError(f"parameter {member}: directions of {len(known)} elements were loaded, not {length}")
            self._starts[member] = start.to(bucket.device, dtype)
            scheme.directions[member] = known.to(bucket.device, dtype)

    def send(self, flat: Tensor, scale: float, unused: Sequence[slice]) -> Sending:
        """Sends the accumulated gradient along the last step's directions; dense in the first steps."""
        self._step, self._columns = self._scheme.stood, None if self._scheme.dense_steps_left else self._scheme.rank
        return super().send(flat, scale, unused)

    def facts(self) -> str:
        """Those of this step, which may be a dense one."""
        elements = powersgd_elements(self.bucket.shapes, self._columns)
        return f"powersgd(rank={self._columns}, numel={self.bucket.numel}, {self._dtype}, elements={elements})"

    def schedule(self, accumulated: Tensor) -> Schedule[LowRank]:
        """Two sums; a direction that has become zero starts anew, without waiting for a GPU."""
        known, starts = self._scheme.directions | self._new, {} if self._columns is None else self._starts
        alive = [torch.where(known[member].any(0), known[member], start) for member, start in starts.items()]
        return low_rank_sum(self.bucket, self._columns, accumulated, alive, self._comm)

    def receive(self, sending: Sending, result: LowRank) -> tuple[Tensor, Tensor]:
        """The mean; keeps the directions for the next step."""
        self._new.update(zip(self._starts, orthonormal(result.q), strict=False))  # none of a dense step
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


class LowRank(NamedTuple):
    """Result of `low_rank_sum`; q: Σ Q by matrix."""

    total: Tensor
    dropped: Tensor
    q: list[Tensor]


def low_rank_sum(
    bucket: Bucket, columns: int | None, accumulated: Tensor, directions: Sequence[Tensor], comm: Communicator
) -> Schedule[LowRank]:
    """Two sums for a whole bucket: all P and what is dense, then all Q.

    columns: r; None: all of it is dense. directions: (m, r) by matrix.
    """
    low_rank, spans, views = matrices_of(bucket.shapes, columns), spans_of(bucket), bucket.views(accumulated)
    dense = [span for i, span in enumerate(spans) if i not in low_rank]
    own_p = [_matrix(views[i]) @ q for i, q in zip(low_rank, directions, strict=True)]
    sums = yield from _summed([*own_p, *(accumulated[span] for span in dense)], comm)
    total, dropped = torch.empty_like(accumulated), torch.zeros_like(accumulated)
    for span, found in zip(dense, sums[len(own_p) :], strict=True):
        total[span] = found
    if not low_rank:
        return LowRank(total, dropped, [])
    p = orthonormal(sums[: len(own_p)])
    own_q = [_matrix(views[i]).T @ basis for i, basis in zip(low_rank, p, strict=True)]
    q = yield from _summed(own_q, comm)
    summed, left = bucket.views(total), bucket.views(dropped)
    for at, i in enumerate(low_rank):
        summed[i].copy_(outer_sum(p[at], q[at]).view(views[i].shape))
        torch.sub(views[i], (p[at] @ own_q[at].T).view(views[i].shape), out=left[i])  # this rank's: in any order
    return LowRank(total, dropped, q)


def powersgd_sent(
    rank: int, size: int, shapes: Shapes, columns: int | None, *, dtype: torch.dtype = torch.float32
) -> Traffic:
    """Exact traffic of a rank for a bucket of these shapes: two dense sums, or one without matrices.

    Args:
        rank: This rank.
        size: P.
        shapes: Those of the bucket's tensors.
        columns: r; None: in a step that is summed dense.
        dtype: Of the gradients.
    """
    sums = [numel for i, numel in enumerate(powersgd_elements(shapes, columns)) if i == 0 or numel]
    return Traffic.total(*(ALGORITHMS["dense"].sent(rank, size, 0, numel, dtype) for numel in sums))


def powersgd_elements(shapes: Shapes, columns: int | None) -> tuple[int, int]:
    """Elements of the two sums of a bucket: Σ n·r and what is dense, Σ m·r; all of them in the first without r."""
    low_rank, r = set(matrices_of(shapes, columns)), columns or 0
    dense = sum(shape.numel() for i, shape in enumerate(shapes) if i not in low_rank)
    sizes = [rows_and_columns(shapes[i]) for i in low_rank]
    return dense + r * sum(n for n, _ in sizes), r * sum(m for _, m in sizes)


def matrices_of(shapes: Shapes, columns: int | None) -> list[int]:
    """Positions of the tensors whose P and Q have fewer elements than they: (n + m)·r < n·m; none without r."""
    sizes = {i: rows_and_columns(shape) for i, shape in enumerate(shapes) if len(shape) > 1 and shape.numel()}
    return [i for i, (n, m) in sizes.items() if columns is not None and (n + m) * columns < n * m]


def rows_and_columns(shape: torch.Size) -> tuple[int, int]:
    """A tensor as a matrix: its first dimension by the others."""
    return shape[0], shape.numel() // shape[0]


def _matrix(view: Tensor) -> Tensor:
    return view.reshape(len(view), -1)


def _summed(tensors: Sequence[Tensor], comm: Communicator) -> Schedule[list[Tensor]]:
    """Sums over ranks, all in one message."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    total = yield from schedules.allreduce(flat, comm.rank, comm.size)
    parts = total.split_with_sizes([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
