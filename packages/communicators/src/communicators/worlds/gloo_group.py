"""A gloo group that can be let go of: torch's ends with the last reference to it, which anybody may hold for long."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions, ProcessGroupGloo, Store

from communicators.worlds.waiters import WAIT, Waitable


class GlooGroup:
    """Group of gloo that ends at `close`; what is posted afterwards raises RuntimeError, as where a connection is gone.

    Each has three threads and a connection to every peer. It is not made by dist.new_group, whose names count a rank's
    groups, so that ranks which are in other groups would never meet.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._made: Any = ProcessGroupGloo(store, rank, size, WAIT)

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Waitable:
        """Posts a message."""
        work: Waitable = self._open().send(tensors, peer, tag)
        return work

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Waitable:
        """Posts room for a message."""
        work: Waitable = self._open().recv(tensors, peer, tag)
        return work

    def allreduce(self, tensors: list[Tensor]) -> Waitable:
        """Starts a sum, which outlives `close`."""
        made = self._open()
        return _Sum(made.allreduce(tensors, AllreduceOptions()).wait, made)

    def close(self) -> None:
        """Lets go of torch's group, and of its threads and connections once no sum is under way."""
        self._made = None

    def _open(self) -> Any:
        made = self._made  # read once: another thread may close it
        if made is None:
            raise RuntimeError("this communicator is closed")
        return made


class _Sum:
    """Sum under way, which keeps its group: the group's end would wait for it while Python stands still."""

    def __init__(self, wait: Callable[[timedelta], bool], group: Any) -> None:
        self.wait, self._group = wait, group
