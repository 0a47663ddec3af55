"""Ranks that are held up, as experiments with stragglers want it."""

from __future__ import annotations

import time
from collections.abc import Callable

from communicators import Communicator
from partial_collectives import injected_delays

from thinwire_trainer.command_line.options import Options
from thinwire_trainer.errors import RunError


def held_up(options: Options, comm: Communicator) -> Callable[[int], None]:
    """Waits, at a step's beginning, as long as --inject-delay says of this rank and step; of "none" not at all."""
    text = options.own["inject_delay"]
    try:
        seconds = injected_delays("" if text == "none" else text, comm.rank, comm.size, seed=options.seed)
    except ValueError as error:
        raise RunError(f"--inject-delay: {error}") from error

    def wait(step: int) -> None:
        if late := seconds(step):
            began = comm.clock()
            comm.elapse(late)
            if comm.clock() - began < late / 2:  # a real clock, which goes by itself
                time.sleep(late)

    return wait
