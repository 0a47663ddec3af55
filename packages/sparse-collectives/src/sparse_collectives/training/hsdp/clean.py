"""An exchange of which no NaN stays: where nonfinite="raise" is caught, training goes on."""

from __future__ import annotations

from collections.abc import Sequence

from communicators import Bucket, Work
from sparse_compress.nonfinite import all_finite
from torch import Tensor

from sparse_collectives.training.exchange import Exchange


class CleanExchange(Exchange):
    """As `Exchange`; `undo` lets go of every NaN and inf, also where steps cannot be rolled back.

    Residuals and velocities are copied only when a gradient that is not finite is about to be added to them: then they
    are put back. Of the step's other buckets, what was sent is lost.
    """

    _before: dict[tuple[str, str], Tensor | None] | None = None  # by memory and parameter; None: there was nothing

    def start(self, bucket: Bucket, flat: Tensor, *, scale: float = 1.0, unused: Sequence[slice] = ()) -> Work[Tensor]:
        """See `Exchange.start`. The NaN is sent as well, because by that the other ranks learn of it."""
        if self._nonfinite == "raise" and self.scheme.memories and not bool(all_finite(flat)):
            self._copy(bucket)
        return super().start(bucket, flat, scale=scale, unused=unused)

    def settle(self) -> bool:
        """See `Exchange.settle`."""
        self._before = None
        return super().settle()

    def undo(self) -> None:
        """See `Exchange.undo`."""
        super().undo()
        for memory in self.scheme.memories:
            for name, kept in self.kept(memory).items():
                self._clean(kept, (memory, name))
        self._before = None

    def _copy(self, bucket: Bucket) -> None:
        before = self._before = self._before or {}
        for memory in self.scheme.memories:
            kept = self.kept(memory)
            for name in (self._names[member] for member in bucket.members):
                before.setdefault((memory, name), kept[name].clone() if name in kept else None)

    def _clean(self, kept: Tensor, what: tuple[str, str]) -> None:
        if self._before is not None and what in self._before:
            before = self._before[what]
            kept.zero_() if before is None else kept.copy_(before)
        if not bool(all_finite(kept)):  # finite gradients overflow in a residual as well, and a state may bring NaN
            kept.masked_fill_(~kept.isfinite(), 0.0)
