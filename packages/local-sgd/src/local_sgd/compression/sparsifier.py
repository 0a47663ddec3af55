"""What a user gives to exchange sparsely: a compressor that keeps residuals, and a sum over ranks of what it sends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias, runtime_checkable

from communicators import Communicator, Work
from torch import Tensor


@runtime_checkable
class Sparsifier(Protocol):
    """A compressor with error feedback, such as `sparse_compress.ErrorFeedback`. Every name has a residual of its own.

    Its law: what is sent and what is kept afterwards are together what was given and what was kept before.
    """

    def compress(self, name: str, delta: Tensor, /) -> Any:
        """What is sent of a 1-D tensor and the residual of that name; the rest is the residual from now on."""

    def restore(self, name: str, dropped: Any, /) -> None:
        """Adds to the residual what a sum over ranks did not take."""

    def state_dict(self) -> dict[str, Any]:
        """The residuals."""

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Goes on with them."""


class HasDense(Protocol):
    """A sparse vector."""

    def to_dense(self) -> Tensor:
        """All of it, 1-D."""


class Summed(Protocol):
    """What comes of a sum, such as `sparse_collectives.Reduction`.

    total: over ranks, alike on all of them, dense or with `to_dense`. dropped: for `Sparsifier.restore`, or None.
    """

    @property
    def total(self) -> Tensor | HasDense: ...

    @property
    def dropped(self) -> Any: ...


class Allreduce(Protocol):
    """A sum over ranks of what a `Sparsifier` sends; a `Work` goes on while `StreamingDiLoCo` computes."""

    def __call__(self, sent: Any, comm: Communicator, /) -> Summed | Work[Summed]: ...


Compress: TypeAlias = str | Sparsifier | None
