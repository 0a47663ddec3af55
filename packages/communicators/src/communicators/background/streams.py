"""Side streams on a GPU for the kernels of background calls, beside the caller's stream, so that backward goes on.

- The stream begins behind what the caller's current stream holds at the start, which produces the call's inputs.
- A call is over when its stream is idle, seen by the host. So its result is complete on any stream.
- The caching allocator knows nothing of other streams: what a schedule was given stays alive until its stream is
  idle, and a result is recorded on the stream that takes it, so that no memory is given away while it is in use.

A call that runs in its caller's thread stays on the caller's stream; on a CPU there are no streams.
Reasoned from the rules of CUDA and of torch's allocator and futures; not yet run on a GPU.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class SideStreams:
    """The streams of one communicator: as many as calls are in flight at a time; idle ones are used again."""

    def __init__(self) -> None:
        self._idle: defaultdict[torch.device, list[torch.cuda.Stream]] = defaultdict(list)

    def beside(self, schedule: Any, device: torch.device) -> SideStream:
        """A stream for a schedule that has not begun, behind the caller's current one."""
        idle = self._idle[device]
        stream = idle.pop() if idle else torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        return SideStream(stream, given(schedule), idle)


class SideStream:
    """The stream of one call."""

    def __init__(self, stream: torch.cuda.Stream, given: list[Any], idle: list[torch.cuda.Stream]) -> None:
        self._stream, self._given, self._idle = stream, given, idle

    def current(self) -> AbstractContextManager[Any]:
        """Context in which kernels go to this stream."""
        return torch.cuda.stream(self._stream)

    def is_idle(self) -> bool:
        """Whether all kernels of the stream are done; does not block. Asked after the last one, until True."""
        if not self._stream.query():
            return False
        self._given.clear()
        self._idle.append(self._stream)
        return True


def given(schedule: Any) -> list[Any]:
    """Arguments of a schedule that has not begun, also those of the schedules inside it."""
    if not inspect.isgenerator(schedule):
        return []
    values = list(inspect.getgeneratorlocals(schedule).values())
    return values + [inner for value in values for inner in given(value)]


def owned_here(value: T, device: torch.device) -> T:
    """The same value; its tensors are recorded on this thread's current stream, which may use and free them."""
    future: torch.futures.Future[T] = torch.futures.Future(devices=[device])
    future.set_result(value)
    return future.wait()


def with_index(device: torch.device) -> torch.device:
    """A GPU with its number: the current one for "cuda" alone, as other threads have another current one."""
    return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
