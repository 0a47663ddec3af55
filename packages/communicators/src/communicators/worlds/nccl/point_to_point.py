"""NCCL by point-to-point: messages of a GPU that never pass through host memory.

What follows from NCCL's messages having neither tags nor lengths is in `untagged`, and tested over a line that is not
NCCL. This line is reasoned from torch's sources and not yet run: in particular that `abort` frees a GPU that waits
for a message for ever, and what it costs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from communicators.worlds.nccl.untagged import Launched
from communicators.worlds.waiters import WAIT

CONNECT_POLL_SECONDS = 1e-3
ABORT_SECONDS = 5.0
"""Longest time that the end of the process waits for a communicator to be aborted."""


class NCCL:
    """A communicator of our own with a group's ranks, made when the first call has its turn; one GPU a rank."""

    device_type = "cuda"
    summed: Collection[torch.dtype] = (
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.int8, torch.uint8, torch.int32, torch.int64),
    )

    def __init__(self, store: Store, rank: int, size: int) -> None:
        from torch._C._distributed_c10d import ProcessGroupNCCL  # not in every build of torch

        self._store, self._duplicates = store, 0
        options = ProcessGroupNCCL.Options()
        options._timeout = WAIT  # the engine watches the clock; NCCL's own watchdog ends the process
        self._group: Any = ProcessGroupNCCL(store, rank, size, options)
        self._device: torch.device | None = None
        self._connected: Future[None] = Future()
        self._aborting: threading.Thread | None = None

    def ready(self, device: torch.device) -> bool:
        """Whether NCCL is connected; ValueError for a second device."""
        if self._device is None:
            self._device = device
            threading.Thread(target=self._connect, name="communicators-nccl", daemon=True).start()
        if device != self._device:
            raise ValueError(f"data are on {device}, but were on {self._device} before: use one GPU a rank and group")
        return self._connected.done() and self._connected.result() is None

    def sendrecv(self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor]) -> Launched:
        """Launches a round as one coalesced group."""
        self._group._start_coalescing()
        try:
            for peer, buffer in recvs.items():
                self._group.recv([buffer], peer, 0)
            for peer, payload in sends.items():
                self._group.send([payload], peer, 0)
        finally:  # NCCL counts open groups by thread: the user's own calls would be caught in it
            launched: Launched = self._group._end_coalescing()
        return launched

    def sum(self, tensor: Tensor) -> Launched:
        """Launches NCCL's own allreduce, in place."""
        launched: Launched = self._group.allreduce([tensor])
        return launched

    def duplicate(self) -> NCCL:
        """Another NCCL communicator of the same ranks."""
        self._duplicates += 1
        store = PrefixStore(f"duplicate/{self._duplicates}", self._store)
        return NCCL(store, self._group.rank(), self._group.size())

    def abort(self) -> None:
        """Aborts in a thread of its own, which waits for NCCL's."""
        if self._aborting is None:
            self._aborting = threading.Thread(target=self._group.abort, name="communicators-abort", daemon=True)
            self._aborting.start()

    def close(self) -> None:
        """Aborts: an orderly end would wait for all ranks, but they have departed, or are lost."""
        self.abort()
        if self._aborting is not None:
            self._aborting.join(ABORT_SECONDS)

    def _connect(self) -> None:
        """Connects by a first sum: groups of messages go by the communicator of all ranks, which they do not make."""
        try:
            launched = self.sum(torch.zeros(1, device=self._device))
            while not launched.is_completed():
                time.sleep(CONNECT_POLL_SECONDS)
            launched.wait()
            self._connected.set_result(None)
        except Exception as error:
            self._connected.set_exception(error)


def uses_nccl(group: dist.ProcessGroup) -> bool:
    """Whether a group's backend for CUDA tensors is NCCL."""
    try:
        return bool(group._get_backend(torch.device("cuda")).name() == "nccl")
    except RuntimeError:  # none for CUDA tensors
        return False
