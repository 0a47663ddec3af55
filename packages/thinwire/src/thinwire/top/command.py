"""Shows a running training: every rank's step, what its time goes to, bytes, link, and who is late.

WHERE is HOST:PORT of the ranks' metrics (--metrics prometheus of the trainer, or metrics.serving() in a script), or the
--output folder of one run of the trainer. One HOST:PORT stands for all ranks of its machine. Ctrl-C ends it.

Examples:
  thinwire top
  thinwire top node1:9464 node1:9465 node2:9464
  thinwire top runs/cifar-resnet20-digits-gtopk
"""

import argparse
import sys
import time
from collections.abc import Sequence

from communicators import metrics
from rich.console import Console, RenderableType
from rich.live import Live

from thinwire.advice.command import quantity
from thinwire.top.places import NothingHere, Place, place_of
from thinwire.top.view import Seen, frame

SECONDS = quantity("seconds from 0.1 to 3600", 0.1, 3600)
LOOKS = 6
"""Looks that --once takes at most until something has moved."""


def look(place: Place, seen: dict[str, Seen]) -> RenderableType:
    """Takes what a place tells now into `seen`, by name, and renders it.

    NothingHere at the first look, where it tells nothing.
    """
    try:
        told = place.read()
    except NothingHere:
        if not seen:
            raise
        told = {}
    for name, stats in told.items():
        seen.setdefault(name, Seen(stats)).take(stats)
    for name in seen.keys() - told.keys():
        seen[name].gone = True
    return frame(list(seen.values()), silent=[name for name in place.silent if name not in seen])


def watch(place: Place, console: Console, seconds: float, *, once: bool) -> str:
    """Shows frames until the job ends; returns the last word on it. once: one frame, when something has moved."""
    seen: dict[str, Seen] = {}
    shown = look(place, seen)
    if once:
        for _ in range(LOOKS):
            if all(each.before or each.gone for each in seen.values()):
                break
            time.sleep(seconds)
            shown = look(place, seen)
        console.print(shown)
        return ""
    with Live(shown, console=console, auto_refresh=False) as live:
        while not all(each.gone for each in seen.values()):
            time.sleep(seconds)
            live.update(look(place, seen), refresh=True)
    steps = max((each.now.get("steps", 0) for each in seen.values()), default=0)
    return f"the job has ended, after step {steps:.0f}"


def main(argv: Sequence[str]) -> int:
    """Shows a training; returns the exit status, 1 where there is none, 2 where flags make no sense."""
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="thinwire top", description=__doc__, formatter_class=shape)
    here = f"localhost:{metrics.PORT}"
    parser.add_argument("where", nargs="*", metavar="WHERE", help=f"HOST:PORT …, or a folder; default: {here}")
    parser.add_argument("--interval", type=SECONDS, default=1.0, metavar="T", help="between frames, in s; default 1")
    parser.add_argument("--once", action="store_true", help="print one frame, as soon as steps were taken")
    flags = parser.parse_args(argv)
    try:
        if last := watch(place_of(flags.where or [here]), Console(), flags.interval, once=flags.once):
            print(last)
    except NothingHere as error:
        print(f"thinwire top: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        pass
    return 0
