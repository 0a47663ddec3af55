"""--profile: a few steps of rank 0 as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing.

Every phase of a step has its name there, and in it what the packages do (select, merge, restore). Each exchange, from
its start to its end, is a bar on a track of its own: what it shares with forward and backward is hidden by them.
"""

from pathlib import Path

from communicators import tracing
from torch.profiler import profile

from thinwire_trainer.records.durable import write_aside

SKIPPED, RECORDED = 2, 6  # steps: the first ones allocate and agree


class Trace:
    """Called after every step, and closed at the end, whatever came before."""

    def __init__(self, path: Path, *, skipped: int = SKIPPED, recorded: int = RECORDED) -> None:
        self.path = path
        self._begins, self._ends, self._steps = skipped, skipped + recorded, 0
        self._profile: profile | None = None

    def step(self) -> None:
        """A step has ended."""
        self._steps += 1
        if self._steps == self._begins:
            self._profile = tracing.recording()
            self._profile.start()
        elif self._steps == self._ends:
            self.close()

    def close(self) -> None:
        """Writes what has been recorded, if that has not been done."""
        if self._profile is None:
            return
        recorded, self._profile = self._profile, None
        recorded.stop()
        raw = self.path.with_name(f"{self.path.name}.raw")
        tracing.write_trace(recorded, raw)
        write_aside(self.path, raw.read_text())
        raw.unlink()
