"""Training as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing, with exchanges beside what computes.

`labelled` names what the packages do: "select", "merge", "restore", "wait". Any torch.profiler records those of the
thread that it was started in, and of backward's; `recording` also those of the background engine's thread, each
"exchange" and each message. `write_trace` makes one file of all ranks.
"""

import errno
import gzip
import json
import os
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from communicators import timeline
from communicators.labels import Span, keep
from communicators.labels import labelled as labelled
from communicators.labels import spanning as spanning
from communicators.origin import as_communicator


class Recording(profile):
    """torch.profiler.profile that also has the labels of threads that torch does not see."""

    def start_trace(self) -> None:
        super().start_trace()
        self._spans: list[Span] = []
        keep(self._spans)

    def stop_trace(self) -> None:
        keep(None)
        super().stop_trace()

    def export_chrome_trace(self, path: str, *given: Any, **options: Any) -> None:
        """Writes the trace to a file, compressed where its name ends in ".gz"; once, as torch's own, which it calls."""
        text = json.dumps(exported(self, *given, **options)).encode()
        Path(path).write_bytes(gzip.compress(text) if str(path).endswith(".gz") else text)

    def spans(self, base: int) -> list[timeline.Event]:
        """Events of the labels that are kept, with times after `base`, in ns, and names of their threads."""
        pid, running = os.getpid(), {thread.native_id: thread.name for thread in threading.enumerate()}
        events = [span.event(pid, base) for span in self._spans]
        return events + [
            {"ph": "M", "pid": pid, "tid": thread, "name": "thread_name", "args": {"name": running[thread]}}
            for thread in {event["tid"] for event in events} & running.keys()
        ]


def recording(**options: Any) -> profile:
    """A torch.profiler.profile with the labels of all threads, and of the GPU where there is one.

        with recording() as recorded:
            loss.backward(); optimizer.step()
        write_trace(recorded, "trace.json")

    Args:
        options: Options of torch.profiler.profile, such as `schedule` or `record_shapes`.
    """
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
    return Recording(**{"activities": activities, **options})


def write_trace(recorded: profile | None, path: str | Path, comm: Any = None) -> None:
    """Writes what was recorded, on this rank or on all, to a file for ui.perfetto.dev.

        write_trace(recorded, "trace.json", comm)

    Args:
        recorded: See `trace_of`.
        path: The file, JSON in the trace event format; rank 0 writes it.
        comm: See `trace_of`.
    """
    if (trace := trace_of(recorded, comm)) is not None:
        Path(path).write_text(json.dumps(trace))


def trace_of(recorded: profile | dict[str, Any] | None, comm: Any = None) -> dict[str, Any] | None:
    """Trace of what was recorded, on this rank or on all, in the trace event format.

    A message is a bar on both of its ranks, from where it was posted until it has come, within a millisecond, and an
    arrow between them. Bars called "wait" are times in which a rank's training waits for others. Exchanges, messages
    and waits are on tracks of their own. Labels of what a rank computes are those that torch.profiler records.

    Args:
        recorded: A torch.profiler.profile that has ended, or what `exported` made of it; None on a rank that has
            recorded nothing.
        comm: Ranks whose traces make one: see `as_communicator`; all ranks call. Their clocks are compared by pings,
            and "otherData" says how far they may differ. Ranks that an `Elastic` has lost are not in it. Default: this
            rank alone.

    Returns:
        The trace, with `comm` on rank 0 alone; None on the others, and where nobody has recorded anything.

    Raises:
        CollectiveError: The ranks do not all come.
        OSError: See `exported`; the other ranks have their trace, without this one.
    """
    trace = failed = None
    try:
        trace = recorded if recorded is None or isinstance(recorded, dict) else exported(recorded)
    except OSError as error:
        if comm is None:
            raise
        failed = error  # raised when the others, who wait for this rank, have met it
    if comm is not None:
        own = None if trace is None else timeline.Recorded.of(trace)
        found = timeline.gathered(own, as_communicator(comm))
        if failed is not None:
            raise failed
        return found
    if trace is None:
        return None
    return trace | {"traceEvents": timeline.on_tracks(timeline.named_messages(trace["traceEvents"]))}


def exported(recorded: profile, *given: Any, **options: Any) -> dict[str, Any]:
    """Trace as torch writes it, which it does only once: to be kept where `trace_of` may be called again.

    Args:
        recorded: A torch.profiler.profile that has ended.
        *given: Further arguments of its `export_chrome_trace`.
        **options: Likewise.

    Raises:
        OSError: The temporary folder, which torch's own file passes through, has no room, or cannot be written.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(recorded, str(path), *given, **options)
        try:
            trace: dict[str, Any] = json.loads(path.read_text())
        except (FileNotFoundError, ValueError) as error:  # torch does not say that it could not write, or not all
            why = "torch could not write its trace here: make room, or set TMPDIR to another folder"
            raise OSError(errno.EIO, why, tempfile.gettempdir()) from error
    if isinstance(recorded, Recording):
        trace["traceEvents"] += recorded.spans(int(trace.get("baseTimeNanoseconds", 0)))
    return trace
