"""Timeline of several ranks in the trace event format: one process a rank, one clock, an arrow for each message.

A message is a label on either side, "message to 2, 4096 bytes, …" where it was posted and "message from 0, …" until it
has come. Both end in a key of group, call and place in the call, by which they are paired.
"""

from __future__ import annotations

import json
import os
import platform
import re
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from communicators.communicator import Communicator, run
from communicators.elastic.transfer import give, take
from communicators.schedule import Payload, Round, Schedule, among

Event = dict[str, Any]
"""Event in the trace event format; times in µs."""
PINGS = 16
SLACK_US = 50.0
"""Error of a profiler's own clock."""
DEVICES = 100_000
"""Numbers of processes from here on are devices of ranks."""
_MESSAGE = re.compile(r"message (to|from) (\d+), (\d+) bytes, (\S+)")


def message(way: str, peer: int, nbytes: int, key: str) -> str:
    """Label of a message; way: "to" a peer or "from" it."""
    return f"message {way} {peer}, {nbytes} bytes, {key}"


def bar(rank: int, track: str, name: str, began: float, ended: float, **args: Any) -> Event:
    """Bar on a track of a rank; times in seconds."""
    where = {"pid": rank, "tid": track, "ts": began * 1e6, "dur": (ended - began) * 1e6}
    return {"ph": "X", "cat": "user_annotation", "name": name, **where, "args": args}


def named_messages(events: Iterable[Event]) -> list[Event]:
    """Events of one rank; those that are labels of messages get short names, and what they tell as arguments."""
    found = []
    for event in events:
        if told := _MESSAGE.fullmatch(str(event.get("name", ""))):
            way, peer, nbytes, key = told.groups()
            args = {"way": way, "peer": int(peer), "bytes": int(nbytes), "key": key}
            event = {**event, "name": f"{way} rank {peer}: {nbytes} B", "args": args}
        found.append(event)
    return found


def paired(events: list[Event], within: Sequence[float]) -> list[tuple[Event, Event]]:
    """Messages as their two bars; what was sent becomes a bar until it has come, on the same clock.

    Pairs have the same key; several of one key are paired in the order of time. What does not fit, because one side was
    not recorded, has no arrow.

    within: bound of the error of each rank's clock, in µs.
    """
    sides: dict[str, dict[str, list[Event]]] = defaultdict(lambda: {"to": [], "from": []})
    for event in sorted((event for event in events if "key" in event.get("args", ())), key=lambda event: event["ts"]):
        sides[event["args"]["key"]][event["args"]["way"]].append(event)
    beside = [pair for side in sides.values() for pair in zip(side["to"], side["from"], strict=False)]
    pairs = [pair for pair in beside if _fits(*pair, within)]
    for sent, came in pairs:
        _join(sent, came)
    return pairs


def _fits(sent: Event, came: Event, within: Sequence[float]) -> bool:
    """Whether two bars can be of one message."""
    late = came["ts"] + came["dur"] + within[sent["pid"]] + within[came["pid"]] >= sent["ts"]
    return bool(late and sent["pid"] != came["pid"] and sent["args"]["bytes"] <= came["args"]["bytes"])


def _join(sent: Event, came: Event) -> None:
    """Names both bars alike; what was sent lasts until it has come, which is not before."""
    for event, way, peer in ((sent, "to", came["pid"]), (came, "from", sent["pid"])):
        event["name"] = f"{way} rank {peer}: {sent['args']['bytes']} B"
        event["args"] |= {"peer": peer, "bytes": sent["args"]["bytes"]}
    came["dur"] = max(came["dur"], sent["ts"] - came["ts"])
    sent["dur"] = came["ts"] + came["dur"] - sent["ts"]


def _arrow(number: int, sent: Event, came: Event) -> list[Event]:
    """Flow from the beginning of one bar to the last nanosecond of another, both ends within their bars."""
    about = {"name": "message", "cat": "message", "id": number}
    tail, head = ({"pid": event["pid"], "tid": event["tid"]} for event in (sent, came))
    last = came["ts"] + max(came["dur"] - 1e-3, 0.0)
    return [{"ph": "s", **about, **tail, "ts": sent["ts"]}, {"ph": "f", "bp": "e", **about, **head, "ts": last}]


def on_tracks(events: list[Event]) -> list[Event]:
    """Events of a trace ("traceEvents"), those that overlap one another moved to tracks where they follow.

    They begin in one thread and end in another, so that on a thread's own track viewers take them for nested, and
    leave out what does not fit.
    """
    ends: defaultdict[tuple[Any, str], list[float]] = defaultdict(list)
    named: list[Event] = []
    for one in sorted((event for event in events if _kind(event)), key=lambda event: float(event["ts"])):
        pid, kind = one["pid"], _kind(one)
        tracks = ends[pid, kind]
        free = (track for track, end in enumerate(tracks) if end <= one["ts"])
        track = next(free, len(tracks))
        if track == len(tracks):
            tracks.append(0.0)
            about = {"ph": "M", "pid": pid, "tid": f"{kind} {track}", "name": "thread_name"}
            named.append({**about, "args": {"name": f"{kind} {track}"}})
        tracks[track] = one["ts"] + one["dur"]
        one["tid"] = f"{kind} {track}"
    return events + named


def _kind(event: Event) -> str:
    """Track that an event is moved to, as one of those under way side by side; "" for all others."""
    if event.get("ph") != "X" or event.get("cat") != "user_annotation":
        return ""
    name = str(event.get("name"))
    if "key" in event.get("args", ()):
        return name.partition(":")[0]
    kinds = {"exchange": "exchanges", "wait": "waiting"}
    return kinds.get(name, "messages" if name.startswith("gloo:") else "")


@dataclass(frozen=True)
class Recorded:
    """Trace of one rank.

    Attributes:
        events: Events, with times after `base`.
        base: Time in ns.
        pid: Number of the process in the events.
        host: Name of the machine.
    """

    events: list[Event]
    base: int
    pid: int
    host: str

    @staticmethod
    def of(trace: dict[str, Any]) -> Recorded:
        """Trace that torch.profiler has written in this process."""
        events = named_messages(trace["traceEvents"])
        return Recorded(events, int(trace.get("baseTimeNanoseconds", 0)), os.getpid(), platform.node())

    def packed(self) -> Tensor:
        """Bytes, compressed."""
        return torch.frombuffer(bytearray(zlib.compress(json.dumps(vars(self)).encode(), 1)), dtype=torch.uint8)

    @staticmethod
    def unpacked(data: bytes) -> Recorded:
        """Trace that `packed` gave."""
        return Recorded(**json.loads(zlib.decompress(data)))


def gathered(own: Recorded | None, comm: Communicator) -> dict[str, Any] | None:
    """Timeline of all ranks on rank 0, None elsewhere and where nobody has recorded anything; every rank calls it."""
    packed = torch.zeros(0, dtype=torch.uint8, device="cpu") if own is None else own.packed()

    def exchange() -> tuple[list[bytes], list[tuple[float, float]]]:
        here = comm.rank, comm.size
        clocks = run(compared_clocks(*here, time.time_ns, _machine()), comm, facts="clocks", device=CPU)
        return run(_to_first(packed, *here), comm, facts="traces", device=CPU), clocks

    packs, clocks = comm.atomic(exchange)
    if not any(packs):
        return None
    return merged([Recorded.unpacked(pack) if pack else None for pack in packs], clocks)


CPU = torch.device("cpu")


def merged(traces: Sequence[Recorded | None], clocks: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """One trace of those of all ranks, None where a rank has none.

    clocks: of each rank, what its clock is ahead of rank 0's, and the bound of that error, in µs.
    """
    base = min((trace.base for trace in traces if trace is not None), default=0)
    within = [bound + SLACK_US for _, bound in clocks]
    events: list[Event] = []
    for rank, (trace, (ahead, bound)) in enumerate(zip(traces, clocks, strict=True)):
        if trace is not None:
            events += _of_rank(trace, rank, len(traces), (trace.base - base) / 1e3 - ahead)
            label = {"labels": f"{trace.host}, clock within {bound:.0f} µs of rank 0's"}
            events += about(rank, rank, process_name={"name": f"rank {rank}"}, process_labels=label)
    bounds = {"clock_error_us": {f"rank {rank}": bound for rank, (_, bound) in enumerate(clocks)}}
    return {"baseTimeNanoseconds": base, "otherData": bounds, **assembled(events, within)}


def assembled(events: list[Event], within: Sequence[float]) -> dict[str, Any]:
    """Trace of events of all ranks on one clock, messages paired and joined by arrows.

    within: bound of the error of each rank's clock, in µs.
    """
    pairs = paired(events, within)
    tracked = on_tracks(events)
    arrows = [end for number, pair in enumerate(pairs) for end in _arrow(number, *pair)]
    return {"schemaVersion": 1, "displayTimeUnit": "ms", "traceEvents": tracked + arrows}


def _of_rank(trace: Recorded, rank: int, size: int, shift: float) -> list[Event]:
    """Events of a rank under its number, shifted by so many µs; those of the profiler itself are left out."""
    moved = []
    for event in trace.events:
        pid = event.get("pid")
        if not isinstance(pid, int) or event.get("name") in ("process_name", "process_labels", "process_sort_index"):
            continue
        event = {**event, "pid": rank if pid == trace.pid else DEVICES * (pid + 1) + rank}
        if "ts" in event:
            event["ts"] = event["ts"] + shift
        if isinstance(event.get("id"), int):  # arrows of torch's own
            event["id"] = event["id"] * size + rank
        moved.append(event)
    for device in {event["pid"] for event in moved if event["pid"] >= DEVICES}:
        moved += about(device, size + rank, process_name={"name": f"rank {rank}: GPU {device // DEVICES - 1}"})
    return moved


def about(pid: int, order: int, **named: dict[str, str]) -> list[Event]:
    """Events that describe a process."""
    entries = {**named, "process_sort_index": {"sort_index": order}}
    return [{"ph": "M", "pid": pid, "tid": 0, "name": name, "args": args} for name, args in entries.items()]


def compared_clocks(
    rank: int, size: int, clock: Callable[[], int], machine: int
) -> Schedule[list[tuple[float, float]]]:
    """Lead of each rank's clock over rank 0's, and the bound of its error, in µs, on rank 0 (Cristian, 1989).

        ahead = theirs − (sent + back)/2,  bound = (back − sent)/2          of the quickest of PINGS pings

    Ranks of one machine have one clock, without an error. A drift between the recording and now is not seen.

    clock: this rank's, in ns. machine: number of its machine.
    """
    found = [(0.0, 0.0)]
    if rank:
        for _ in range(PINGS):
            yield Round(recvs={0: 0})
            yield Round(sends={0: Payload.of(torch.tensor([clock(), machine], device="cpu"))})
        return found
    for peer in range(1, size):
        ahead, bound, there = yield from _pinged(peer, clock)
        found.append((0.0, 0.0) if there == machine else (ahead, bound))
    return found


def _pinged(peer: int, clock: Callable[[], int]) -> Schedule[tuple[float, float, int]]:
    """Lead of a peer's clock, the bound of its error, and its machine."""
    pings, there = [], 0
    for _ in range(PINGS):
        sent = clock()
        yield Round(sends={peer: Payload.of(torch.zeros(0, dtype=torch.uint8, device="cpu"))})
        received = yield Round(recvs={peer: 16})
        theirs, there = received[peer].view(torch.int64).tolist()
        back = clock()
        pings.append(((back - sent) / 2e3, (theirs - (sent + back) / 2) / 1e3))
    bound, ahead = min(pings)
    return ahead, bound, there


def _machine() -> int:
    """Number of this machine since it was started, the same in all of its containers."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        boot = platform.node()
    return zlib.crc32(boot.encode())


def _to_first(own: Tensor, rank: int, size: int) -> Schedule[list[bytes]]:
    """Bytes of all ranks, on rank 0, which takes all of one rank, then all of the next."""
    if rank:
        yield from among(give(own), [rank, 0], "trace")
        return []
    found = [own.numpy().tobytes()]
    for source in range(1, size):
        taken = yield from among(take(), [source, 0], "trace")
        found.append(taken.getvalue())
    return found
