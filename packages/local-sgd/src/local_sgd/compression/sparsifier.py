"""Arguments for a sparse exchange: a compressor that keeps residuals, and a sum over ranks of what it sends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias, runtime_checkable

from communicators import Communicator, Work
from torch import Tensor


@runtime_checkable
class Sparsifier(Protocol):
    """Compressor with error feedback, such as `sparse_compress.ErrorFeedback`; every name has a residual of its own.

    Its law: what is sent, plus the residual afterwards, equals what was given, plus the residual before.
    """

    def compress(self, name: str, delta: Tensor, /) -> Any:
        """Selects what to send of a 1-D tensor plus the residual of that name; the residual keeps the rest."""

    def restore(self, name: str, dropped: Any, /) -> None:
        """Adds to the residual what a sum over ranks dropped."""

    def state_dict(self) -> dict[str, Any]:
        """All residuals."""

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Restores the residuals."""


class HasDense(Protocol):
    """Sparse vector with a dense form."""

    def to_dense(self) -> Tensor:
        """All elements, 1-D."""


class Summed(Protocol):
    """Result of a sum, such as `sparse_collectives.Reduction`.

    total: over ranks, the same on all of them, dense or with `to_dense`. dropped: for `Sparsifier.restore`, or None.
    """

    @property
    def total(self) -> Tensor | HasDense: ...

    @property
    def dropped(self) -> Any: ...


class Allreduce(Protocol):
    """Sum over ranks of what a `Sparsifier` sends; a `Work` that it returns runs while `StreamingDiLoCo` computes."""

    def __call__(self, sent: Any, comm: Communicator, /) -> Summed | Work[Summed]: ...


Compress: TypeAlias = str | Sparsifier | None
