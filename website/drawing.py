"""A recording as a picture: time runs to the right, a lane for each rank, an arrow for each message. Plain SVG."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from math import hypot, sqrt

from communicators.simulated.timeline import Sent

from website.recording import Computed, Recording

WIDTH, LEFT, RIGHT, TOP, LANE, FOOT = 760, 64, 24, 52, 52, 58  # pixels
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #3c4149 } .title { font-size: 14px; font-weight: 600; fill: #16191d }
.page { fill: #ffffff; stroke: #d8dce2 } .lane, .tick { stroke: #aab1bb }
.bytes { font-size: 10.5px; text-anchor: middle }
.number { text-anchor: middle }
.r0 { --c: #0b62a4 } .r1 { --c: #b45309 } .r2 { --c: #0f7a55 } .r3 { --c: #a3306f }
.sent { stroke: var(--c) } .head { fill: var(--c) } .work { fill: var(--c); fill-opacity: .22; stroke: var(--c) }
@media (prefers-color-scheme: dark) {
text { fill: #c6ccd6 } .title { fill: #f1f3f6 }
.page { fill: #1b1e26; stroke: #3a404c } .lane, .tick { stroke: #6a7280 }
.r0 { --c: #6cb6f5 } .r1 { --c: #f0a63c } .r2 { --c: #46c99a } .r3 { --c: #ee8cc2 }
}
""".strip()


def drawn(recording: Recording, title: str, below: str) -> str:
    """The picture; `below` is a sentence under it."""
    height = TOP + LANE * (recording.size - 1) + FOOT
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>\n{STYLE}\n</style>",
        f'<rect class="page" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="6"/>',
        f'<text class="title" x="16" y="22">{escape(title)}</text>',
        *_lanes(recording.size),
        *(_box(each, recording.seconds) for each in recording.computed),
        *_messages(recording),
        *_axis(recording, height),
        f'<text x="16" y="{height - 10}">{escape(below)}</text>',
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _x(seconds: float, whole: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * seconds / whole


def _y(rank: int) -> int:
    return TOP + LANE * rank


def _lanes(size: int) -> Iterator[str]:
    for rank in range(size):
        yield f'<text x="16" y="{_y(rank) + 4}">rank {rank}</text>'
        yield f'<line class="lane" x1="{LEFT}" y1="{_y(rank)}" x2="{WIDTH - RIGHT}" y2="{_y(rank)}"/>'


def _box(each: Computed, whole: float) -> str:
    begin, end = _x(each.began, whole), _x(each.ended, whole)
    return (
        f'<rect class="work r{each.rank}" x="{begin:.1f}" y="{_y(each.rank) - 7}" '
        f'width="{end - begin:.1f}" height="14" rx="2"/>'
    )


def _messages(recording: Recording) -> Iterator[str]:
    most = max((s.nbytes for s in recording.sent), default=1)
    labelled = -1e9  # pixels; one rank's numbers, where there is room
    for each in recording.sent:
        yield from _arrow(each, recording.seconds, 0.8 + 2.2 * sqrt(each.nbytes / most))
        begin = _x(each.began, recording.seconds)
        if each.source == 0 and begin - labelled > 52 and begin < WIDTH - RIGHT - 30:
            labelled = begin
            yield f'<text class="bytes" x="{begin + 14:.1f}" y="{TOP - 12}">{short(each.nbytes)}</text>'


def _arrow(each: Sent, whole: float, width: float) -> Iterator[str]:
    x1, y1, x2, y2 = _x(each.began, whole), _y(each.source), _x(each.ended, whole), _y(each.target)
    length = hypot(x2 - x1, y2 - y1)
    dx, dy, size = (x2 - x1) / length, (y2 - y1) / length, 6 + width
    bx, by = x2 - size * dx, y2 - size * dy  # where the head begins
    side = size / 2.4
    yield (
        f'<line class="sent r{each.source}" x1="{x1:.1f}" y1="{y1}" x2="{bx:.1f}" y2="{by:.1f}" '
        f'stroke-width="{width:.1f}"/>'
    )
    left, right = (bx - side * dy, by + side * dx), (bx + side * dy, by - side * dx)
    corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in ((x2, y2), left, right))
    yield f'<polygon class="head r{each.source}" points="{corners}"/>'


def _axis(recording: Recording, height: int) -> Iterator[str]:
    y, step = height - 40, _round_step(recording.seconds)
    for number in range(int(recording.seconds / step + 1e-9) + 1):
        x = _x(number * step, recording.seconds)
        yield f'<line class="tick" x1="{x:.1f}" y1="{y - 6}" x2="{x:.1f}" y2="{y - 2}"/>'
        unit = "" if number else " ms"
        yield f'<text class="number" x="{x:.1f}" y="{y + 10}">{number * step * 1e3:.4g}{unit}</text>'


def _round_step(seconds: float) -> float:
    """1, 2 or 5 times a power of ten, so that there are 4 to 9 of them."""
    for power in range(-7, 3):
        for factor in (1, 2, 5):
            if seconds / (factor * 10.0**power) < 9:
                return factor * 10.0**power
    raise ValueError(f"a recording of {seconds} s is not for a picture")


def short(nbytes: int) -> str:
    """Such as 8.0 kB."""
    return f"{nbytes} B" if nbytes < 1000 else f"{nbytes / 1e3:.1f} kB" if nbytes < 1e6 else f"{nbytes / 1e6:.1f} MB"
