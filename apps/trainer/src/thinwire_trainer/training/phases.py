"""Phases of a step's time: they follow one another without a gap, so that they add up to the step.

data       until the model is called first: reading, augmenting, copying to the device
forward    from there to the loss
backward   with clipping
selection  of what is sent, part of the exchange's call
exchange   the rest of it, and of averages: messages, waiting for other ranks, merging
update     the optimizer and its rate

On a CPU the phases are timed where they happen. On a GPU they are the device's time, by events in its stream. These are
read when the step's loss has been read anyway: nothing waits for a kernel that would not have been waited for.
Only what is selection in an exchange is the host's time there: kernels that it has queued count where they are waited
for.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise

import torch
from communicators import tracing
from torch import nn

PHASES = ("data", "forward", "backward", "selection", "exchange", "update")


class HostStopwatch:
    """Moments of one step by the host's clock, and the seconds between them."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._moments: list[float] = []

    def mark(self) -> None:
        """Mark a moment."""
        self._moments.append(self._clock())

    def intervals(self) -> list[float]:
        """Seconds from each moment to the next; forgets them."""
        moments, self._moments = self._moments, []
        return [end - begin for begin, end in pairwise(moments)]


class DeviceStopwatch:
    """Moments of one step by events in the current stream of the GPU, and the seconds between them."""

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []
        self._spare: list[torch.cuda.Event] = []

    def mark(self) -> None:
        """Mark a moment."""
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._events.append(event)

    def intervals(self) -> list[float]:
        """Seconds from each moment to the next; forgets them. The device has done all that was marked by then."""
        events, self._events = self._events, []
        events[-1].synchronize()
        self._spare += events
        return [begin.elapsed_time(end) / 1e3 for begin, end in pairwise(events)]


Stopwatch = HostStopwatch | DeviceStopwatch


def stopwatch_of(device: torch.device) -> Stopwatch:
    """The one for work on this device."""
    return DeviceStopwatch() if device.type == "cuda" else HostStopwatch()


class Phases:
    """The phases of the steps of one rank: `enter` one after another, then `end`.

    On a profiler's trace they are there as "step: forward", ….
    """

    def __init__(self, stopwatch: Stopwatch) -> None:
        self._stopwatch = stopwatch
        self._names: list[str] = []
        self._label: AbstractContextManager[object] = nullcontext()

    def enter(self, name: str) -> None:
        """The next phase begins, and the one before it ends."""
        self._label.__exit__(None, None, None)
        self._stopwatch.mark()
        self._names.append(name)
        self._label = tracing.labelled(f"step: {name}")
        self._label.__enter__()

    def end(self) -> dict[str, float]:
        """The step has ended; seconds by phase. To be called when the device has done its work."""
        self._stopwatch.mark()
        self._label.__exit__(None, None, None)
        self._label = nullcontext()
        names, self._names = self._names, []
        seconds = dict.fromkeys(PHASES, 0.0)
        for name, interval in zip(names, self._stopwatch.intervals(), strict=True):
            seconds[name] += interval
        return seconds

    @contextmanager
    def forward_of(self, model: nn.Module) -> Iterator[None]:
        """During the block a step's data end, and its forward begins, where `model` is called first."""

        def first(module: nn.Module, arguments: object) -> None:
            del module, arguments
            if self._names[-1:] == ["data"]:
                self.enter("forward")

        hook = model.register_forward_pre_hook(first)
        try:
            yield
        finally:
            hook.remove()
