"""The sum of whole gradients in int8: a quarter of the bytes, with what is rounded off fed back into the next step.

Quantised twice, once by every rank and once by the rank that sums, with error feedback on both: DoubleSqueeze (Tang et
al., ICML 2019). Block by block, as 8-bit optimizers do (Dettmers et al., ICLR 2022).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from communicators import Bucket, Communicator, Round, Schedule
from communicators.dense_schedules import allgather_blocks, block_bounds
from communicators.schedule import SLOT_BYTES, body, frame
from torch import Tensor

from sparse_collectives.prediction.traffic import Traffic, bruck_sent, together
from sparse_collectives.training.exchange import Transfer
from sparse_collectives.training.nonfinite import first_nonfinite
from sparse_collectives.training.parts import PARTS
from sparse_collectives.training.schemes.int8_blocks import BLOCK, packed, packed_nbytes, unpacked
from sparse_collectives.training.schemes.residuals import Residuals, in_units


class Rounded(NamedTuple):
    """total: the agreed sum. rest: what this rank must add to its residual; over all ranks, inputs = total + rests."""

    total: Tensor
    rest: Tensor


class Int8Sum:
    """See `Scheme`. With this rank's residual e, and Q that rounds to int8 block by block:

        a ← e + gradient;  e ← a − Q(a), but for the span that this rank sums, which needs no rounding
        total ← Q(Σ a or Q(a)) by span;  e ← e + what the span's owner has rounded off;  mean ← total / ranks

    Scales are powers of two, so sums of what is rounded and of what is left over are exact where float32 is.
    """

    parts: Sequence[str] = PARTS[:1]

    def __init__(self, comm: Communicator) -> None:
        self._comm, self._residuals = comm, Residuals()

    def meet(self, key: str, bucket: Bucket, kept: Mapping[str, Tensor]) -> None:
        """TypeError for float64 gradients, of which most would wait for long."""
        if bucket.dtype == torch.float64:
            raise TypeError("dense-int8 carries float32 values, but gradients are float64: take algorithm='dense'")
        self._residuals.meet(key, kept)

    def forget(self, key: str) -> dict[str, Tensor]:
        """See `Scheme.forget`."""
        return self._residuals.forget(key)

    def transfer(self, key: str, flat: Tensor, scale: float, unused: Sequence[slice]) -> Transfer:
        """Of what has accumulated."""
        total = self._residuals.accumulated(key, in_units(flat, scale), unused)
        return _Quantised(self._residuals, self._comm, key, total, scale, unused)

    def commit(self) -> None:
        """See `Scheme.commit`."""
        self._residuals.commit()

    def rollback(self) -> None:
        """See `Scheme.rollback`."""
        self._residuals.rollback()

    def kept(self) -> dict[str, dict[str, Tensor]]:
        """See `Scheme.kept`."""
        return self._residuals.kept()

    def state_dict(self) -> dict[str, Any]:
        """Nothing but residuals."""
        return {"algorithm_state": []}

    def reset(self, state: Mapping[str, Any]) -> None:
        """See `Scheme.reset`."""
        self._residuals.reset(state)


@dataclass(frozen=True, eq=False)
class _Quantised:
    """See `Transfer`. given: what has accumulated, flat."""

    residuals: Residuals
    comm: Communicator
    key: str
    given: Tensor
    scale: float
    unused: Sequence[slice]
    summed: None = None

    @property
    def facts(self) -> str:
        return f"dense-int8(numel={self.given.numel()})"

    @property
    def schedule(self) -> Schedule[Rounded]:
        return int8_sum(self.given, self.comm.rank, self.comm.size)

    def agreed(self, result: Rounded) -> Tensor:
        return result.total

    def own(self, result: Rounded) -> Tensor:
        return result.rest

    def suspect(self) -> int:
        return first_nonfinite(self.given)

    def end(self, result: Rounded, flat: Tensor) -> tuple[Tensor, Tensor]:
        """The mean as an optimizer will see it: scaled, and in the gradient's own dtype, which may overflow."""
        self.residuals.put(self.key, result.rest, self.unused)
        mean = (result.total / self.comm.size * self.scale).to(flat.dtype)
        return mean, mean


def int8_sum(x: Tensor, rank: int, size: int) -> Schedule[Rounded]:
    """Sum over ranks of 1-D float32: a split, in which every rank gets its span of all, and a gather of the sums.

    P − 1 messages in one round, then ⌈log P⌉ rounds (Bruck); 2n(P − 1)/P elements of one byte, and the scales.
    """
    if size == 1:
        return Rounded(x.clone(), torch.zeros_like(x))
    spans = _spans(x.numel(), size)
    rest = torch.zeros_like(x)
    gives: dict[int, Tensor] = {}
    for peer in _others(rank, size):
        span = slice(*spans[peer])
        gives[peer] = packed(x[span])
        rest[span] = x[span] - unpacked(gives[peer], len(x[span]))
    own = slice(*spans[rank])
    capacity = SLOT_BYTES + packed_nbytes(len(x[own]))
    sends = {peer: frame(given) for peer, given in gives.items()}
    received = yield Round(sends, dict.fromkeys(sends, capacity))
    total = x[own].clone()
    for peer in sorted(received):
        total += unpacked(body(received[peer], torch.int8), len(total))
    coded = packed(total)
    rest[own] = total - unpacked(coded, len(total))
    lengths = [high - low for low, high in spans]
    gathered = yield from allgather_blocks(coded.view(torch.uint8), [packed_nbytes(n) for n in lengths], rank, size)
    sums = [unpacked(block.view(torch.int8), n) for block, n in zip(gathered, lengths, strict=True)]
    return Rounded(torch.cat(sums), rest)


def dense_int8_sent(rank: int, size: int, numel: int) -> Traffic:
    """What a rank sends, exactly: all spans but its own, then Bruck's share of all."""
    if size == 1:
        return Traffic(0, 0, 0)
    nbytes = [packed_nbytes(high - low) for low, high in _spans(numel, size)]
    split = sum(nbytes) - nbytes[rank] + (size - 1) * SLOT_BYTES
    return together(Traffic(split, size - 1, 1), bruck_sent(nbytes, rank))


def _spans(numel: int, size: int) -> list[tuple[int, int]]:
    """Whole blocks for every rank; the last one may be shorter."""
    bounds = block_bounds(-(-numel // BLOCK), size)
    return [(min(low * BLOCK, numel), min(high * BLOCK, numel)) for low, high in bounds]


def _others(rank: int, size: int) -> list[int]:
    """Not all of them to the same one first."""
    return [(rank + distance) % size for distance in range(1, size)]
