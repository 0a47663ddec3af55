"""Draws docs/pictures/timeline.svg: one step of a DDP training, out of a trace that was recorded.

torchrun --nproc-per-node 3 examples/ddp_trace.py trace.json
python -m website.timeline trace.json   keeps one step of it in timeline.json, and draws that; without a file: draws it
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from website.drawing import LANE, LEFT, RIGHT, STYLE, TOP, WIDTH

KEPT = Path(__file__).parent / "timeline.json"
PICTURE = Path(__file__).parent.parent / "docs" / "pictures" / "timeline.svg"
STEP = 1
"""Number of the step that is drawn."""
BOXES = ("forward", "backward", "step", "select", "wait")
LEGEND = (
    "Boxes: forward (dark), backward (light), the optimizer&apos;s step (full). Lines: selecting. Dashed: waiting.",
    "Arrows: messages, from where they were posted until they had come.",
)
FOOT, MARGIN_US = 76, 1000.0
OWN_STYLE = """
.box { fill: var(--c); fill-opacity: .16; stroke: var(--c); stroke-width: .7 } .forward { fill-opacity: .38 }
.step, .select { fill-opacity: 1; stroke: none } .wait { fill: #ffffff; fill-opacity: .9; stroke-dasharray: 3 2 }
.sent { stroke-width: .7; stroke-opacity: .75 }
@media (prefers-color-scheme: dark) { .wait { fill: #1b1e26 } }
""".strip()

Event = dict[str, Any]


def kept(trace: dict[str, Any]) -> dict[str, Any]:
    """One step of a trace: what is drawn, as a trace of its own."""
    bars = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["name"] in BOXES]
    steps = [sorted((bar for bar in bars if bar["name"] == name), key=_began) for name in ("forward", "step")]
    ranks = 1 + max(bar["pid"] for bar in bars)
    first, last = (each[ranks * STEP : ranks * (STEP + 1)] for each in steps)
    begin, end = min(map(_began, first)) - MARGIN_US, max(bar["ts"] + bar["dur"] for bar in last) + MARGIN_US
    messages = [event for event in trace["traceEvents"] if _is_of_message(event)]
    inside = [
        event for event in [*bars, *messages] if begin <= event["ts"] and event["ts"] + event.get("dur", 0) <= end
    ]
    ends = [event["id"] for event in inside if "id" in event]
    whole = [event for event in inside if event["ph"] == "X" or ends.count(event["id"]) == 2]
    return {"displayTimeUnit": "ms", "traceEvents": [_short(event, begin) for event in sorted(whole, key=_began)]}


def _is_of_message(event: Event) -> bool:
    arrow: bool = event["ph"] in "sf" and event["cat"] == "message"
    return arrow or (event["ph"] == "X" and str(event["name"]).startswith(("to rank ", "from rank ")))


def _began(event: Event) -> float:
    return float(event["ts"])


def _short(event: Event, begin: float) -> Event:
    names = ("ph", "name", "cat", "id", "bp", "pid", "tid")
    times = {"ts": round(event["ts"] - begin, 4)} | ({"dur": round(event["dur"], 4)} if "dur" in event else {})
    return {name: event[name] for name in names if name in event} | times


def drawn(trace: dict[str, Any]) -> str:
    """The picture of a trace that `kept` gave."""
    events = trace["traceEvents"]
    ranks = 1 + max(event["pid"] for event in events)
    whole = max(event["ts"] + event.get("dur", 0) for event in events)
    height, title = TOP + LANE * (ranks - 1) + FOOT, f"One step of DDP with gTop-k on {ranks} ranks, as it was recorded"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>\n{STYLE}\n{OWN_STYLE}\n</style>",
        f'<rect class="page" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="6"/>',
        f'<text class="title" x="16" y="22">{escape(title)}</text>',
        *(f'<text x="16" y="{_y(rank) + 4}">rank {rank}</text>' for rank in range(ranks)),
        *(_box(event, whole) for name in BOXES for event in events if event["name"] == name),
        *_arrows(events, whole),
        f'<text x="16" y="{height - 32}">{LEGEND[0]}</text>',
        f'<text x="16" y="{height - 12}">{LEGEND[1]} {whole / 1e3:.0f} ms in all.</text>',
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _x(us: float, whole: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * us / whole


def _y(rank: int) -> int:
    return TOP + LANE * rank


def _box(event: Event, whole: float) -> str:
    begin, end = _x(event["ts"], whole), _x(event["ts"] + event["dur"], whole)
    return (
        f'<rect class="box {event["name"]} r{event["pid"]}" x="{begin:.1f}" y="{_y(event["pid"]) - 9}" '
        f'width="{max(end - begin, 1.0):.1f}" height="18"/>'
    )


def _arrows(events: list[Event], whole: float) -> Iterator[str]:
    heads = {event["id"]: event for event in events if event["ph"] == "f"}
    for tail in (event for event in events if event["ph"] == "s"):
        head = heads[tail["id"]]
        down = 9 if head["pid"] > tail["pid"] else -9
        x1, x2, y1, y2 = _x(tail["ts"], whole), _x(head["ts"], whole), _y(tail["pid"]) + down, _y(head["pid"]) - down
        yield f'<line class="sent r{tail["pid"]}" x1="{x1:.1f}" y1="{y1}" x2="{x2:.1f}" y2="{y2}"/>'
        yield f'<circle class="head r{tail["pid"]}" cx="{x2:.1f}" cy="{y2}" r="1.6"/>'


def main(argv: list[str]) -> None:
    """Keeps a step of the trace that is given, and draws what is kept."""
    if argv:
        KEPT.write_text(json.dumps(kept(json.loads(Path(argv[0]).read_text())), indent=0) + "\n")
    PICTURE.write_text(drawn(json.loads(KEPT.read_text())))


if __name__ == "__main__":
    main(sys.argv[1:])
