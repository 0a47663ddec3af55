"""Training as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing, with exchanges beside what computes.

`labelled` names what the packages do: "select", "exchange", "merge", "restore". Any torch.profiler records those of the
thread that it was started in, and of backward's; `recording` also those of the background engine's thread.
"""

import json
from collections import defaultdict
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.autograd import profiler
from torch.profiler import ProfilerActivity, profile

EXCHANGE = "exchange"
MESSAGES = "gloo:"
"""Prefix of the transport's own labels, for messages that are under way side by side."""
_NOBODY: AbstractContextManager[object] = nullcontext()


def labelled(name: str) -> AbstractContextManager[object]:
    """Labels a block where torch.profiler records; else nothing happens, which takes a fifth of a µs.

    Labels of a thread nest: a block that begins inside another one ends there, too.
    torch has no public way to ask whether anybody records: where the private one is missing, all blocks are labelled,
    which takes 6 µs each.
    """
    return profiler.record_function(name) if getattr(profiler, "_is_profiler_enabled", True) else _NOBODY


def recording(**options: Any) -> profile:
    """A torch.profiler.profile of all threads, where torch can, and of the GPU where there is one.

        with recording() as recorded:
            loss.backward(); optimizer.step()
        write_trace(recorded, "trace.json")

    Args:
        options: Options of torch.profiler.profile, such as `schedule` or `record_shapes`.
    """
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
    try:
        everywhere = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    except (AttributeError, TypeError):  # an older torch
        everywhere = None
    return profile(**{"activities": activities, "experimental_config": everywhere, **options})


def write_trace(recorded: profile, path: str | Path) -> None:
    """Writes what was recorded, each exchange from its start to its end as a bar on a track of its own.

    Args:
        recorded: A torch.profiler.profile that has ended.
        path: The file, JSON.
    """
    path = Path(path)
    recorded.export_chrome_trace(str(path))
    trace = json.loads(path.read_text())
    path.write_text(json.dumps(trace | {"traceEvents": on_tracks(trace["traceEvents"])}))


def on_tracks(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events of a trace ("traceEvents"), those that overlap one another moved to tracks where they follow.

    They begin in one thread and end in another, so that on a thread's own track viewers take them for nested, and
    leave out what does not fit.
    """
    ends: defaultdict[str, list[float]] = defaultdict(list)
    named: list[dict[str, Any]] = []
    for bar in sorted((event for event in events if _kind(event)), key=lambda event: float(event["ts"])):
        kind = _kind(bar)
        free = (track for track, end in enumerate(ends[kind]) if end <= bar["ts"])
        track = next(free, len(ends[kind]))
        if track == len(ends[kind]):
            ends[kind].append(0.0)
            about = {"ph": "M", "pid": bar["pid"], "tid": f"{kind} {track}", "name": "thread_name"}
            named.append({**about, "args": {"name": f"{kind} {track}"}})
        ends[kind][track] = bar["ts"] + bar["dur"]
        bar["tid"] = f"{kind} {track}"
    return events + named


def _kind(event: dict[str, Any]) -> str:
    """Track that an event is moved to, as one of those under way side by side; "" for all others."""
    if event.get("ph") != "X" or event.get("cat") != "user_annotation":
        return ""
    name = str(event.get("name"))
    return "exchanges" if name == EXCHANGE else "messages" if name.startswith(MESSAGES) else ""
