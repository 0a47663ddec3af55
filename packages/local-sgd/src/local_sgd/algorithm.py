"""What an algorithm of the family says of itself: what it keeps, and its equation at a boundary."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from communicators import Communicator
from communicators.replicas.wrapping import Wrapping
from torch import Tensor

from local_sgd.averaging import Averaging
from local_sgd.compression.averaging import CompressedAveraging
from local_sgd.compression.choice import Compression
from local_sgd.compression.sums import CompressedSum
from local_sgd.levels import Inner, Near
from local_sgd.parts import Part


class Algorithm(Wrapping):
    """What a subclass of `PeriodicAveraging` may say otherwise; `boundary` is all that it must say."""

    anchors: tuple[str, ...] = ()
    """What an algorithm keeps that begins as x, and is the model when all is drained; the first one is its model."""
    momenta: ClassVar[tuple[str, ...]] = ()
    """What it keeps that begins at zero."""
    settings: ClassVar[tuple[str, ...]] = ()
    """Its attributes that ranks must share."""
    overlaps: ClassVar[bool] = False
    """The mean at a boundary is of what was launched at the last one."""
    mean_is_model: ClassVar[bool] = False
    """The model is the mean over ranks, not the first anchor."""
    compression: Compression = Compression()
    """How the change is exchanged; without one, the model itself."""
    inner: Inner | None = None
    """The first of two levels."""
    more: tuple[str, ...] = ()
    """The keys of `more_state`."""
    needs_rate: ClassVar[bool] = False
    """Parameter groups must have an "lr"."""

    _what: str  # its name, in errors
    _comm: Communicator
    _native: bool
    _trained: dict[str, Tensor]  # the parameters that are averaged, by name
    _parts: list[Part]  # they as flat vectors
    _averaging: Averaging
    _sums: CompressedSum | None  # what a compressor's messages come to
    _near: Near | None  # this rank's small group, of two levels

    @abstractmethod
    def boundary(self, part: Part, x: Tensor, mean: Tensor) -> Tensor:
        """The algorithm: x after the boundary; changes what is kept in `part`, and may change x.

        Args:
            part: Some of the parameters, flat, with what is kept of them.
            x: This rank's, a copy.
            mean: Over ranks, of x or, where the algorithm overlaps, of what the last boundary returned.

        Returns:
            What may be kept in `part` too; it is copied.
        """

    def after_boundary(self) -> None:
        """Called when `boundary` was, for all parts, and before what it returned is copied."""

    def depart(self, part: Part, x: Tensor) -> Tensor:
        """Of an algorithm that overlaps, its boundary where no mean comes: at the beginning and after a drain."""
        del part
        return x

    def check(self) -> None:
        """Fills in settings that depend on the number of ranks, `comm.size`.

        Raises:
            ValueError: A setting does not fit it.
        """

    def gain(self) -> float:
        """The factor by which momentum over blocks multiplies a steady change; 0 if there is none."""
        return 0.0

    def pieces(self) -> list[dict[str, Tensor]]:
        """The parameters that are exchanged together; no vector holds some of two pieces."""
        return [self._trained]

    def averagings(self) -> list[Averaging]:
        """All of them."""
        return [self._averaging]

    def averaging_of(self, parts: list[Part]) -> Averaging:
        """By which these parts are exchanged."""
        if self._sums is None:
            return Averaging(self._comm, self._what, native=self._native)
        return CompressedAveraging(self._comm, self._what, parts, self.anchors[0], self._sums)

    def more_state(self) -> dict[str, Any]:
        """What else the algorithm keeps, for `state_dict`."""
        near = {} if self._near is None else {"near": self._near.state_dict()}
        return near | (
            {} if self._sums is None else {"residuals": {"kind": self._sums.kind, "parts": self._sums.state_dict()}}
        )

    def check_more(self, state: dict[str, Any]) -> None:
        """Changes nothing.

        Args:
            state: What another one's `more_state` gave.

        Raises:
            ValueError: It does not fit here.
        """
        if ("near" in state) != (self._near is not None):
            raise ValueError(f"the state is of {1 + ('near' in state)} levels, sync_every of {1 + bool(self._near)}")
        theirs, own = state.get("residuals", {}).get("kind"), None if self._sums is None else self._sums.kind
        if theirs != own:
            raise ValueError(f"the state is of compression {theirs}, but compress={self.compression!r} is {own}")
        if self._sums is not None and self._is_own(state):
            self._sums.check(state["residuals"]["parts"])

    def load_more(self, state: dict[str, Any]) -> None:
        """Takes over what `more_state` gave and `check_more` let pass."""
        if self._sums is not None and self._is_own(state):
            self._sums.load_state_dict(state["residuals"]["parts"])
        if self._near is not None:
            self._near.load_state_dict(state["near"])

    @property
    def comm(self) -> Communicator:
        """The ranks."""
        return self._comm

    def _is_own(self, state: dict[str, Any]) -> bool:
        """Whether it was saved by this rank of as many."""
        return bool((state["rank"], state["world_size"]) == (self._comm.rank, self._comm.size))
