"""`python -m thinwire_deepspeech.demo`: 2 MPI workers learn spoken digits (synthetic) by dense and sparse gradients."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from thinwire_trainer.command import WRONG_USAGE
from thinwire_trainer.command_line import quantities
from thinwire_trainer.errors import RunError
from thinwire_trainer.launching.ending import stoppable
from thinwire_trainer.launching.placement import Placement, placement
from thinwire_trainer.launching.workers import start_workers
from thinwire_trainer.launching.world import joined

if TYPE_CHECKING:
    from communicators import Communicator


def main(argv: Sequence[str] | None = None) -> int:
    """Start the workers and be done, or be one of them; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    given, place = _flags(argv), placement(os.environ)
    with stoppable(place, program="thinwire_deepspeech.demo"):
        if place.launcher is None and given.nworkers > 1 and not given.simulated:
            try:
                return start_workers(
                    "thinwire_deepspeech.demo", argv, given.nworkers, oversubscribe=given.oversubscribe
                )
            except RunError as error:
                print(f"thinwire_deepspeech.demo: error: {error}", file=sys.stderr)
                return WRONG_USAGE
        return _work(given, place)


def _flags(argv: Sequence[str]) -> Namespace:
    parser = ArgumentParser(prog="python -m thinwire_deepspeech.demo", description=__doc__)
    add = parser.add_argument
    add("--nworkers", type=quantities.count, default=2, help="default: 2")
    add("--oversubscribe", action="store_true", help="more workers than the cores can bear")
    add("--simulated", action="store_true", help="the workers in one process, on one core: the same table, but times")
    add("--max-epochs", type=quantities.count, default=8, help="default: 8")
    add("--seeds", type=quantities.count, default=1, help="runs of each algorithm, to tell chance by (default: 1)")
    add("--data-dir", type=Path, default=Path("data"), metavar="DIR", help="where the digits are kept (default: data)")
    add("--output", type=Path, default=Path("runs/demo-speech"), metavar="DIR", help="default: runs/demo-speech")
    return parser.parse_args(argv)


def _work(given: Namespace, place: Placement) -> int:
    from communicators import SimulatedWorld
    from thinwire_trainer.launching.device import own_device  # brings torch
    from thinwire_trainer.launching.ending import exit_code

    from thinwire_deepspeech.comparison import compare

    def work() -> None:
        device = own_device(place.local_rank)

        def part(comm: Communicator) -> None:
            compare(
                comm,
                epochs=given.max_epochs,
                seeds=given.seeds,
                data_dir=given.data_dir,
                output=given.output,
                device=device,
            )

        if given.simulated:
            SimulatedWorld(given.nworkers).run(part)
            return
        with joined(place) as comm:
            part(comm)

    return exit_code(work, place, program="thinwire_deepspeech.demo")


if __name__ == "__main__":
    sys.exit(main())
