"""--profile: a few steps of rank 0 as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing.

Every phase of a step has its name there, and in it what the packages do (select, merge, restore). Each exchange, from
its start to its end, is a bar on a track of its own: what it shares with forward and backward is hidden by them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from thinwire_trainer.records.durable import write_aside

SKIPPED, RECORDED = 2, 6  # steps: the first ones allocate and agree
EXCHANGE = "exchange"


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
            self._profile = _profile()
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
        recorded.export_chrome_trace(str(raw))
        trace = json.loads(raw.read_text())
        raw.unlink()
        write_aside(self.path, json.dumps(trace | {"traceEvents": on_tracks(trace["traceEvents"])}))


def _profile() -> profile:
    """Of all threads, where torch can: exchanges end in the engine's."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
    try:
        everywhere = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    except TypeError:  # an older torch
        everywhere = None
    return profile(activities=activities, experimental_config=everywhere)


def on_tracks(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same events, exchanges on tracks where they follow one another: viewers take what overlaps for nested."""
    bars = sorted((event for event in events if _is_call(event)), key=lambda event: float(event["ts"]))
    ends: list[float] = []
    named: list[dict[str, Any]] = []
    for bar in bars:
        free = (track for track, end in enumerate(ends) if end <= bar["ts"])
        track = next(free, len(ends))
        if track == len(ends):
            ends.append(0.0)
            about = {"ph": "M", "pid": bar["pid"], "tid": f"exchanges {track}", "name": "thread_name"}
            named.append({**about, "args": {"name": f"exchanges {track}"}})
        ends[track] = bar["ts"] + bar["dur"]
        bar["tid"] = f"exchanges {track}"
    return events + named


def _is_call(event: dict[str, Any]) -> bool:
    return event.get("name") == EXCHANGE and event.get("ph") == "X" and event.get("cat") == "user_annotation"
