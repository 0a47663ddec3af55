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

from data_parallel.exchange import Transfer
from data_parallel.memories import MEMORIES
from data_parallel.nonfinite import first_nonfinite
from data_parallel.schemes.gram_schmidt import orthonormal, outer_sum
from data_parallel.schemes.low_rank_layout import (
    Layout,
    Shapes,
    layout_of,
    powersgd_elements,
    rows_and_columns,
)
from data_parallel.schemes.residuals import Residuals, in_units

DENSE_STEPS = 100
"""Few of a training of thousands; of a shorter one a tenth of the steps is enough (see docs/algorithms/powersgd.md)."""


class LowRank(NamedTuple):
    """Result of `low_rank_sum`. whole: the sum of all dense members; by matrix p: P̂, q: Σ Q, own_q: this rank's Q."""

    whole: Tensor
    p: list[Tensor]
    q: list[Tensor]
    own_q: list[Tensor]


class PowerSGD:
    """Scheme that sends low-rank approximations of gradients, with error feedback.

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
    least.
    """

    keeps: Sequence[str] = MEMORIES[:1]

    def __init__(self, comm: Communicator, *, rank: int, dense_steps: int) -> None:
        self._comm, self._columns, self._dense_steps = comm, rank, dense_steps
        self._residuals = Residuals()
        self._layouts: dict[str, Layout] = {}
        self._without: dict[str, Layout] = {}  # of the same buckets, where no member counts as a matrix
        self._stood, self._begun = 0, False  # steps; whether one is under way
        self._starts: dict[int, Tensor] = {}  # by the matrix's position, alike on all ranks
        self._q: dict[int, Tensor] = {}  # likewise
        self._open: dict[int, Tensor] = {}

    def register(self, key: str, bucket: Bucket, kept: Mapping[str, Tensor]) -> None:
        """Adds a bucket; new matrices get random directions, the same on every rank."""
        self._residuals.register(key, kept)
        layout = self._layouts[key] = layout_of(bucket, self._columns)
        self._without[key] = layout_of(bucket, None)
        dtype = torch.promote_types(bucket.dtype, torch.float32)
        shapes = dict(zip(bucket.members, bucket.shapes, strict=True))
        for member in layout.matrices:
            start = self._drawn(member, rows_and_columns(shapes[member])[1])
            self._starts[member] = start.to(bucket.device, dtype)
            self._q[member] = self._known(member, start).to(bucket.device, dtype)

    def forget(self, key: str) -> dict[str, Tensor]:
        """Forgets the bucket, and returns its residual. Directions belong to matrices, so they outlive their bucket."""
        del self._layouts[key], self._without[key]
        return self._residuals.forget(key)

    def transfer(self, key: str, flat: Tensor, scale: float, unused: Sequence[slice]) -> Transfer:
        """Transfer of the accumulated gradient, along the last step's directions."""
        layout = (self._without if self._stood < self._dense_steps else self._layouts)[key]
        self._begun = True
        total = self._residuals.accumulated(key, in_units(flat, scale), unused)
        directions = [self._alive(member) for member in layout.matrices]
        return _Factored(self, key, layout, total, directions, scale, unused)

    def put(self, key: str, rest: Tensor, unused: Sequence[slice], q: Mapping[int, Tensor]) -> None:
        """Stores a transfer's residual and directions for the next step."""
        self._residuals.put(key, rest, unused)
        self._open.update(q)

    def commit(self) -> None:
        """Keeps this step's residuals and directions."""
        self._residuals.commit()
        self._q.update(self._open)
        self._open.clear()
        self._stood, self._begun = self._stood + self._begun, False

    def rollback(self) -> None:
        """Restores the residuals and directions from before the step."""
        self._residuals.rollback()
        self._open.clear()
        self._begun = False

    def kept(self) -> dict[str, dict[str, Tensor]]:
        """Residuals by bucket: references."""
        return self._residuals.kept()

    def state_dict(self) -> dict[str, Any]:
        """Directions by the matrix's position, as numbers, which torch.distributed.checkpoint loads as a whole.

        And how many steps have stood.
        Not with what an algorithm learns about its ranks: they are alike on all of them, and serve any number.
        """
        directions = [(member, str(q.dtype)[6:], q.tolist()) for member, q in sorted(self._q.items())]
        return {"algorithm_state": [], "directions": directions, "stood": self._stood}

    def reset(self, state: Mapping[str, Any]) -> None:
        """Forgets all buckets, and loads directions. ValueError for those of another r."""
        saved = state.get("directions", ())  # absent from another algorithm's state
        loaded = {member: torch.tensor(q, dtype=getattr(torch, dtype)) for member, dtype, q in saved}
        if wrong := sorted({q.shape[1] for q in loaded.values()} - {self._columns}):
            raise ValueError(
                f"the state was saved with rank={wrong[0]}, but this is powersgd with rank={self._columns}"
            )
        self._residuals.reset(state)
        self._layouts, self._without, self._starts, self._q, self._open = {}, {}, {}, loaded, {}
        older = self._dense_steps if saved else 0  # a state from before there were any
        self._stood, self._begun = state.get("stood", older), False

    @property
    def dense_steps_left(self) -> int:
        """Number of dense steps still to come."""
        return max(0, self._dense_steps - self._stood)

    @property
    def comm(self) -> Communicator:
        """The ranks."""
        return self._comm

    def _known(self, member: int, start: Tensor) -> Tensor:
        known = self._q.get(member, start)
        if (length := len(known)) != len(start):
            raise ValueError(f"parameter {member}: directions of {length} elements were loaded, expected {len(start)}")
        return known

    def _alive(self, member: int) -> Tensor:
        """Directions of a matrix, with its start in place of any that has become zero. Does not wait for a GPU."""
        q = self._open.get(member, self._q[member])
        return torch.where(q.any(0), q, self._starts[member])

    def _drawn(self, member: int, length: int) -> Tensor:
        generator = torch.Generator().manual_seed(member)
        return orthonormal([torch.randn(length, self._columns, generator=generator)])[0]


@dataclass(frozen=True, eq=False)
class _Factored:
    """Transfer in low rank. total: the accumulated gradient, flat; becomes the residual. directions: Q, by matrix."""

    scheme: PowerSGD
    key: str
    layout: Layout
    total: Tensor
    directions: list[Tensor]
    scale: float
    unused: Sequence[slice]
    summed: None = None

    @property
    def facts(self) -> str:
        return self.layout.facts

    @property
    def schedule(self) -> Schedule[LowRank]:
        comm = self.scheme.comm
        matrices, whole = self.layout.views(self.total), self.layout.whole(self.total)
        return low_rank_sum([view.reshape(len(view), -1) for view in matrices], self.directions, whole, comm)

    def agreed(self, result: LowRank) -> Tensor:
        return torch.cat([result.whole, *(q.view(-1) for q in result.q)])

    def own(self, result: LowRank) -> Tensor:
        return torch.cat([result.whole[:0], *(q.view(-1) for q in result.own_q)])

    def suspect(self) -> int:
        return first_nonfinite(self.total)

    def end(self, result: LowRank, flat: Tensor) -> tuple[Tensor, Tensor]:
        """The mean for the optimizer: scaled, and in the gradient's own dtype, which may overflow."""
        size, sums = self.scheme.comm.size, torch.empty_like(self.total)
        for low, high, at in self.layout.spans:
            sums[low:high] = result.whole[at : at + high - low]
            self.total[low:high] = 0
        for view, rest, p, q, own in zip(
            self.layout.views(sums), self.layout.views(self.total), result.p, result.q, result.own_q, strict=True
        ):
            view.copy_(outer_sum(p, q).view(view.shape))
            rest.sub_((p @ own.T).view(rest.shape))  # nobody else's, so in whatever order is fastest
        found = dict(zip(self.layout.matrices, orthonormal(result.q), strict=True))
        self.scheme.put(self.key, self.total, self.unused, found)
        mean = sums.div_(size).mul_(self.scale).to(flat.dtype)
        return mean, mean


def low_rank_sum(
    matrices: Sequence[Tensor], directions: Sequence[Tensor], whole: Tensor, comm: Communicator
) -> Schedule[LowRank]:
    """Two sums for a whole bucket: all P and what goes whole, then all Q.

    matrices: (n, m) each; directions: (m, r) each.
    """
    own_p = [matrix @ q for matrix, q in zip(matrices, directions, strict=True)]
    first = yield from schedules.allreduce(_joined(own_p, whole), comm.rank, comm.size)
    *sums, whole = first.split_with_sizes([*(p.numel() for p in own_p), whole.numel()])
    if not matrices:
        return LowRank(whole, [], [], [])
    p = orthonormal([flat.view(own.shape) for flat, own in zip(sums, own_p, strict=True)])
    own_q = [matrix.T @ basis for matrix, basis in zip(matrices, p, strict=True)]
    second = yield from schedules.allreduce(_joined(own_q), comm.rank, comm.size)
    q = second.split_with_sizes([own.numel() for own in own_q])
    return LowRank(whole, p, [flat.view(own.shape) for flat, own in zip(q, own_q, strict=True)], own_q)


def powersgd_sent(
    rank: int, size: int, shapes: Shapes, columns: int | None, *, dtype: torch.dtype = torch.float32
) -> Traffic:
    """Exact traffic of a rank for a bucket of these shapes: two dense sums, or one without matrices.

    columns: r; None: in a step that is summed dense.
    """
    sums = [numel for i, numel in enumerate(powersgd_elements(shapes, columns)) if i == 0 or numel]
    return together(*(Dense().sent(rank, size, 0, numel, dtype) for numel in sums))


def check_powersgd(rank: int, dense_steps: int) -> None:
    """Raises ValueError for a rank below 1, and for fewer than no steps."""
    if rank < 1:
        raise ValueError(f"rank is {rank}, expected 1 or more columns of P and Q; published: 1 to 4")
    if dense_steps < 0:
        raise ValueError(f"dense_steps is {dense_steps}, expected 0 or more first steps that are summed whole")


def _joined(tensors: Sequence[Tensor], *more: Tensor) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in (*tensors, *more)])
