"""Interface of an algorithm of the family: the state that it keeps, and its equation at a boundary."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from replicas import Wrapping
from torch import Tensor

from local_sgd.averaging import Averaging
from local_sgd.compression.averaging import CompressedAveraging
from local_sgd.compression.choice import Compression
from local_sgd.compression.sums import CompressedSum
from local_sgd.levels import Inner, Near
from local_sgd.parts import Part


class Algorithm(Wrapping):
    """Attributes and methods that a subclass of `PeriodicAveraging` may override; only `boundary` is required."""

    anchors: tuple[str, ...] = ()
    """Names of state that begins as x, and equals the model once all is drained; the first one is the model."""
    momenta: ClassVar[tuple[str, ...]] = ()
    """Names of state that begins at zero."""
    settings: ClassVar[tuple[str, ...]] = ()
    """Names of attributes that ranks must share."""
    overlaps: ClassVar[bool] = False
    """Whether the mean at a boundary is of what the last boundary launched."""
    mean_is_model: ClassVar[bool] = False
    """Whether the model is the mean over ranks, rather than the first anchor."""
    compression: Compression = Compression()
    """Compression of the change; without compression the model itself is exchanged."""
    inner: Inner | None = None
    """First of two levels."""
    more: tuple[str, ...] = ()
    """Keys of `more_state`."""
    needs_rate: ClassVar[bool] = False
    """Whether parameter groups must have an "lr"."""

    _native: bool
    _parts: list[Part]  # the same parameters as flat vectors
    _averaging: Averaging
    _sums: CompressedSum | None  # sums of a compressor's messages
    _near: Near | None  # this rank's small group, of two levels

    @abstractmethod
    def boundary(self, part: Part, x: Tensor, mean: Tensor) -> Tensor:
        """Applies the algorithm and returns x after the boundary; updates the state in `part`, and may change x.

        Args:
            part: Some of the parameters, flat, with the algorithm's state of them.
            x: This rank's parameters, a copy.
            mean: Mean over ranks of x or, where the algorithm overlaps, of what the last boundary returned.

        Returns:
            x after the boundary; it may be state of `part` too, because it is copied.
        """

    def after_boundary(self) -> None:
        """Runs after `boundary` of all parts, before its results are copied."""

    def depart(self, part: Part, x: Tensor) -> Tensor:
        """Replaces `boundary` of an overlapping algorithm where no mean comes: at the beginning and after a drain."""
        del part
        return x

    def check(self) -> None:
        """Fills in settings that depend on the number of ranks, `comm.size`.

        Raises:
            ValueError: A setting does not fit that number.
        """

    def gain(self) -> float:
        """Factor by which momentum over blocks multiplies a steady change; 0 without such momentum."""
        return 0.0

    def pieces(self) -> list[dict[str, Tensor]]:
        """Groups the parameters that are exchanged together; no vector spans two groups."""
        return [self.trained]

    def averagings(self) -> list[Averaging]:
        """All exchanges of this optimizer."""
        return [self._averaging]

    def averaging_of(self, parts: list[Part]) -> Averaging:
        """Exchange of these parts, compressed where compression is asked for."""
        if self._sums is None:
            return Averaging(self._comm, self._what, native=self._native)
        return CompressedAveraging(self._comm, self._what, parts, self.anchors[0], self._sums)

    def more_state(self) -> dict[str, Any]:
        """Further state of the algorithm, for `state_dict`."""
        near = {} if self._near is None else {"near": self._near.state_dict()}
        return near | (
            {} if self._sums is None else {"residuals": {"kind": self._sums.kind, "parts": self._sums.state_dict()}}
        )

    def check_more(self, state: Mapping[str, Any]) -> None:
        """Checks a saved state, and changes nothing.

        Args:
            state: Result of another optimizer's `more_state`.

        Raises:
            ValueError: The state does not fit this optimizer.
        """
        if ("near" in state) != (self._near is not None):
            raise ValueError(f"the state is of {1 + ('near' in state)} levels, sync_every of {1 + bool(self._near)}")
        theirs, own = state.get("residuals", {}).get("kind"), None if self._sums is None else self._sums.kind
        if theirs != own:
            raise ValueError(f"the state is of compression {theirs}, but compress={self.compression!r} is {own}")
        if self._sums is not None and self._is_own(state):
            self._sums.check(state["residuals"]["parts"])

    def load_more(self, state: dict[str, Any]) -> None:
        """Restores what `more_state` gave and `check_more` accepted."""
        if self._sums is not None and self._is_own(state):
            self._sums.load_state_dict(state["residuals"]["parts"])
        if self._near is not None:
            self._near.load_state_dict(state["near"])

    def _is_own(self, state: Mapping[str, Any]) -> bool:
        """Whether the state was saved by this rank, among the same number of ranks."""
        return bool((state["rank"], state["world_size"]) == (self._comm.rank, self._comm.size))
