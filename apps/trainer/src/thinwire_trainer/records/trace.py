"""--profile: a few steps of all ranks as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing.

Every phase of a step has its name there, and in it what the packages do (select, merge, restore). Each exchange, from
its start to its end, is a bar on a track of its own: what it shares with forward and backward is hidden by them. Each
message is an arrow from rank to rank.
"""

import json
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any

from communicators import Communicator, tracing
from torch.profiler import profile

from thinwire_trainer.agreement import all_or_none, gather_texts
from thinwire_trainer.records.durable import write_aside

SKIPPED, RECORDED = 2, 6  # steps: the first ones allocate and agree


class Trace:
    """Called after every step and at the end of epochs, on every rank, and closed at the end, whatever came before.

    records: False: it only takes part, as a rank that joins others later does. writes: whether this rank leaves a trace
    of its own where the run ends before all ranks have met.
    Of ranks that share a process, as in a simulated world, the first to begin records: there is one profiler in each.
    """

    _profiler = Lock()

    def __init__(self, path: Path, *, records: bool = True, writes: bool = True) -> None:
        self.path, self._records, self._writes, self._steps = path, records, writes, 0
        self._running: profile | None = None
        self._recorded: profile | dict[str, Any] | None = None
        self._shared = False

    def step(self) -> None:
        """A step has ended."""
        self._steps += 1
        if self._shared:
            self._recorded = None
        elif self._records and self._steps == SKIPPED and self._profiler.acquire(blocking=False):
            try:
                running = tracing.recording()
                running.start()
            except BaseException:
                self._profiler.release()
                raise
            self._running = running
        elif self._steps == SKIPPED + RECORDED:
            self._stop()

    def share(self, comm: Communicator, *, last: bool) -> None:
        """Writes what all ranks have recorded, once any has; every rank calls it, maybe again after a death.

        last: whether no steps follow. AgreedError where the trace cannot be written, here or by torch.
        """
        if last:
            self._stop()
        if not any(gather_texts("recorded" if self._recorded else "", comm)):
            return
        self._stop()
        self._shared = True
        with all_or_none(comm):
            self._export()
        trace = tracing.trace_of(self._recorded, comm)
        with all_or_none(comm):
            if trace is not None:
                write_aside(self.path, json.dumps(trace))

    def close(self) -> None:
        """Writes what this rank has recorded, if that has not been tried, and can be: why the run ends comes first."""
        self._stop()
        if self._recorded is not None and self._writes and not self._shared:
            with suppress(OSError):
                self._export()
                write_aside(self.path, json.dumps(tracing.trace_of(self._recorded)))

    def _export(self) -> None:
        """Keep torch's trace in the place of its profile, which torch exports only once, or nothing where it cannot."""
        if isinstance(self._recorded, profile):
            recorded, self._recorded = self._recorded, None
            self._recorded = tracing.exported(recorded)

    def _stop(self) -> None:
        if self._running is not None:
            running, self._running = self._running, None
            try:
                running.stop()
            finally:
                self._profiler.release()
            self._recorded = running
