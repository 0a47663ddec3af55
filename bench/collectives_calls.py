"""A sparse allreduce on one rank, timed in parts."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from communicators import Communicator, Received, Round, Schedule, run
from sparse_collectives import Algorithm
from sparse_collectives.allreduce import prepare
from sparse_compress import ErrorFeedback, TopK

from bench.turns import seconds_of

Times = dict[str, float]
"""Seconds of the parts, and counts of bytes and rounds."""


class Training:
    """What one algorithm keeps between the steps of one tensor."""

    def __init__(
        self, comm: Communicator, name: str, entry: Algorithm, compressor: TopK, wait: Callable[[], object]
    ) -> None:
        self.comm, self.name, self.entry, self.compressor = comm, name, entry, compressor
        self.wait, self.feedback = wait, ErrorFeedback(compressor)
        self.state = entry.initial_state()


def sparse(training: Training, gradient: torch.Tensor) -> Times:
    """A whole call, and its parts. The mean takes the gradient's place."""
    comm, state, entry = training.comm, training.state, training.entry
    k, inside = training.compressor.entries(gradient.numel()), [0.0, 0.0]
    prescribed = entry.select(gradient, comm.rank, comm.size, k, state) if entry.prescribes else None
    begin, sent = time.perf_counter(), comm.bytes_sent
    sparse = training.feedback.compress("x", gradient, select=prescribed)
    selected = time.perf_counter()
    schedule, facts = prepare(sparse, comm, k, algorithm=training.name, state=state)
    prepared = time.perf_counter()
    training.wait()
    called = time.perf_counter()
    reduction = run(_watched(schedule, inside), comm, facts=facts)
    exchanged = time.perf_counter()
    training.feedback.restore("x", reduction.dropped)
    restored = time.perf_counter()
    reduction.total.put(gradient, divisor=comm.size)
    end, (merging, rounds) = time.perf_counter(), inside
    return {
        "select": selected - begin,
        "prepare": prepared - selected,
        "merge": merging,
        "exchange": exchanged - called - merging,
        "restore": restored - exchanged,
        "put": end - restored,
        "whole": end - called + prepared - begin,
        "sent": comm.bytes_sent - sent,
        "rounds": rounds,
    }


def _watched(schedule: Schedule[Any], inside: list[float]) -> Schedule[Any]:
    """The same schedule; inside gets the seconds spent in it, and its rounds."""
    received: Received | None = None
    while True:
        begin = time.perf_counter()
        try:
            action = next(schedule) if received is None else schedule.send(received)
        except StopIteration as stop:
            return stop.value
        finally:
            inside[0] += time.perf_counter() - begin
        inside[1] += isinstance(action, Round)
        received = yield action


def whole(call: Callable[[], object]) -> Callable[[], Times]:
    """The call, timed."""
    return lambda: {"whole": seconds_of(call)}


def counted(comm: Communicator, call: Callable[[], object]) -> Callable[[], Times]:
    """The call, timed, with the bytes and messages that it sends."""

    def timed() -> Times:
        sent, messages = comm.bytes_sent, comm.messages_sent
        taken = seconds_of(call)
        counts = {"sent": comm.bytes_sent - sent, "rounds": comm.messages_sent - messages}
        return {"whole": taken, "exchange": taken, **counts}

    return timed


def medians_of(times: Sequence[Times]) -> Times:
    """Of every part."""
    return {name: statistics.median(one[name] for one in times) for name in times[0]}
