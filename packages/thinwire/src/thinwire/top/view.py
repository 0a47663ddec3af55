"""Frames of `thinwire top`: what each rank's time goes to, and who is late."""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

Stats = Mapping[str, float]
SILENT_SECONDS = 15.0
"""Age of a snapshot from which its rank counts as silent."""
LATE = 0.1
"""Share of a step from which a rank counts as late."""
TIMES = ("compute", "select", "wait", "hidden")
COLUMNS = ("rank", "step", "ms", *TIMES, "sent", "Mbit/s", "lacked of")
LEGEND = "ms of a step = compute + select + wait; hidden: beside them; sent in a step"


@dataclass
class Seen:
    """Statistics of one rank, now and as they were when it had taken fewer steps.

    Attributes:
        now: Last statistics.
        moved: Those at which its steps grew last.
        before: Those at which they grew before that; empty where they have not yet.
        gone: Whether it tells nothing any more.
    """

    now: Stats
    moved: Stats = field(default_factory=dict)
    before: Stats = field(default_factory=dict)
    gone: bool = False

    def take(self, stats: Stats) -> None:
        """Takes newer statistics; a run that has begun anew in the same place counts from there."""
        self.gone = False
        if stats.get("seconds", 0.0) < self.now.get("seconds", 0.0):
            self.moved, self.before = {}, {}
        elif stats.get("steps") != self.now.get("steps"):
            self.before, self.moved = self.moved or self.now, stats
        self.now = stats

    def of(self, name: str) -> float:
        """Number of that name, 0 where there is none."""
        return self.now.get(name, 0.0)

    def a_step(self, name: str) -> float:
        """Growth of a number in the last steps, for each of them; of a step that takes long, until now."""
        steps = self.of("steps") - self.before.get("steps", 0.0)
        return max(0.0, self.of(name) - self.before.get(name, 0.0)) / max(1.0, steps)


def frame(ranks: Sequence[Seen], *, silent: Sequence[str] = (), now: float | None = None) -> RenderableType:
    """Renders one frame: a summary, a row for each rank, and what is out of order.

    Args:
        ranks: All that were seen.
        silent: Places of ranks that were never seen.
        now: Unix time, in seconds; default: that of the clock.
    """
    now = time.time() if now is None else now
    ranks = sorted(ranks, key=lambda seen: (seen.gone, -seen.of("generation"), seen.of("rank"), seen.of("part")))
    newest = ranks[0].of("generation") if ranks else 0.0
    living = [seen for seen in ranks if not seen.gone and seen.of("generation") == newest]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    for seen in ranks:
        table.add_row(*_cells(seen), style="" if seen in living else "dim")
    notes = [
        *(f"{name} does not answer" for name in silent),
        *_gone(ranks),
        *_left_behind(ranks, newest),
        *_silent(living, now),
        *_differing(living),
        *late(living),
    ]
    legend = Text(LEGEND, style="dim")
    return Group(Text(_summary(living), style="bold"), table, legend, *(Text(note, style="yellow") for note in notes))


def _summary(living: Sequence[Seen]) -> str:
    if not living:
        return "no rank is left"
    newest = living[0]
    said = [
        f"{len(living)} of {newest.of('ranks'):.0f} ranks",
        f"generation {newest.of('generation'):.0f}" if "generation" in newest.now else "",
        f"step {max(seen.of('steps') for seen in living):.0f}",
        f"epoch {newest.of('epoch'):.0f} of rank 0; --metrics file shows all" if "epoch" in newest.now else "",
        f"residual {newest.of('residual_norm'):.3g}" if "residual_norm" in newest.now else "",
        f"compared at step {newest.of('verified_step'):.0f}" if "verified_step" in newest.now else "",
    ]
    return ", ".join(filter(None, said))


def _cells(seen: Seen) -> list[str]:
    start = [f"{seen.of('rank'):.0f}", f"{seen.of('steps'):.0f}"]
    if not seen.before:
        return start
    step, select, wait, hidden = (
        seen.a_step(name) for name in ("seconds", "seconds_selecting", "seconds_waited", "seconds_hidden")
    )
    times = [f"{1e3 * seconds:.1f}" for seconds in (step, max(0.0, step - select - wait), select, wait, hidden)]
    if "seconds_hidden" not in seen.now:  # epochs do not tell
        times[-1] = ""
    sent, exchanging = seen.a_step("bytes_sent"), seen.a_step("seconds_exchanging")
    rate = f"{8e-6 * sent / exchanging:.1f}" if exchanging else ""
    return [*start, *times, decimal(int(sent)), rate, _lacked(seen)]


def _lacked(seen: Seen) -> str:
    """Peer whose messages it lacked for longest, and how long."""
    awaited = {_peer(name): seen.a_step(name) for name in seen.now if name.startswith("seconds_awaited_of_")}
    peer = max(awaited, key=lambda each: awaited[each], default=0)
    return f"{peer}: {1e3 * awaited[peer]:.1f} ms" if awaited.get(peer) else ""


def _peer(name: str) -> int:
    return int(name.rpartition("_")[2])


def _gone(ranks: Sequence[Seen]) -> list[str]:
    return [f"rank {seen.of('rank'):.0f} has gone after step {seen.of('steps'):.0f}" for seen in ranks if seen.gone]


def _left_behind(ranks: Sequence[Seen], newest: float) -> list[str]:
    left = [seen for seen in ranks if not seen.gone and seen.of("generation") < newest]
    return [
        f"rank {seen.of('rank'):.0f} of generation {seen.of('generation'):.0f} is not seen in generation {newest:.0f}"
        for seen in left
    ]


def _silent(living: Sequence[Seen], now: float) -> list[str]:
    ages = [(seen.of("rank"), now - seen.now["taken_at"]) for seen in living if "taken_at" in seen.now]
    return [f"rank {rank:.0f} has been silent for {age:.0f} s" for rank, age in ages if age > SILENT_SECONDS]


def _differing(living: Sequence[Seen]) -> list[str]:
    """Ranks that hold the same part of a model, and had other hashes at the same step."""
    found: dict[tuple[float, float], dict[float, list[int]]] = {}
    for seen in living:
        if "verified_hash" in seen.now:
            hashes = found.setdefault((seen.of("verified_step"), seen.of("part")), {})
            hashes.setdefault(seen.now["verified_hash"], []).append(int(seen.of("rank")))
    return [
        f"parameters differ at step {step:.0f}: {' against '.join(f'ranks {ranks}' for ranks in hashes.values())}"
        for (step, _), hashes in found.items()
        if len(hashes) > 1
    ]


def late(living: Sequence[Seen]) -> list[str]:
    """Names the rank that is late: as rounds tell it, else the one that waits much less than the others do."""
    moving = [seen for seen in living if seen.before]
    if len(moving) < 2:
        return []
    told = {
        _peer(name): seconds
        for seen in moving
        for name, seconds in seen.now.items()
        if name.startswith("late_seconds_of_")
    }
    waits = {int(seen.of("rank")): -seen.a_step("seconds_waited") for seen in moving}
    lateness = told if len(told) > 1 else waits
    rank = max(lateness, key=lambda each: lateness[each])
    by = lateness[rank] - statistics.median([lateness[each] for each in lateness if each != rank] or [0.0])
    step = statistics.median(seen.a_step("seconds") for seen in moving)
    return [f"rank {rank} is late by {1e3 * by:.0f} ms a step"] if by > LATE * step else []
