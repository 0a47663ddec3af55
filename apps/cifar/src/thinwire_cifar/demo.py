"""`python -m thinwire_cifar.demo`: 4 MPI workers learn real digits with ResNet-20, by dense and by sparse gradients."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from thinwire_trainer.command import WRONG_USAGE
from thinwire_trainer.command_line import quantities
from thinwire_trainer.errors import RunError
from thinwire_trainer.launching.ending import stoppable
from thinwire_trainer.launching.placement import Placement, placement
from thinwire_trainer.launching.workers import start_workers
from thinwire_trainer.launching.world import joined

from thinwire_cifar import behind_link


def main(argv: Sequence[str] | None = None) -> int:
    """Start the workers and be done, or be one of them; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    given, place = _flags(argv), placement(os.environ)
    with stoppable(place, program="thinwire_cifar.demo"):
        if place.launcher is None and given.nworkers > 1:
            try:
                code = start_workers("thinwire_cifar.demo", argv, given.nworkers, oversubscribe=given.oversubscribe)
                if code == 0:
                    print(behind_link.shown(behind_link.measured(given.nworkers)), flush=True)
                return code
            except RunError as error:
                print(f"thinwire_cifar.demo: error: {error}", file=sys.stderr)
                return WRONG_USAGE
        return _work(given, place)


def _flags(argv: Sequence[str]) -> Namespace:
    parser = ArgumentParser(prog="python -m thinwire_cifar.demo", description=__doc__)
    parser.add_argument("--nworkers", type=quantities.count, default=4, help="default: 4")
    parser.add_argument("--oversubscribe", action="store_true", help="more workers than the cores can bear")
    parser.add_argument("--max-epochs", type=quantities.count, default=20, help="default: 20")
    parser.add_argument("--seed", type=quantities.count_or_zero, default=0, help="default: 0")
    parser.add_argument("--output", type=Path, default=Path("runs/demo"), metavar="DIR", help="default: runs/demo")
    return parser.parse_args(argv)


def _work(given: Namespace, place: Placement) -> int:
    from thinwire_trainer.launching.device import own_device  # brings torch
    from thinwire_trainer.launching.ending import exit_code

    from thinwire_cifar.comparison import compare

    def work() -> None:
        device = own_device(place.local_rank)
        with joined(place) as comm:
            compare(comm, epochs=given.max_epochs, seed=given.seed, output=given.output, device=device)

    return exit_code(work, place, program="thinwire_cifar.demo")


if __name__ == "__main__":
    sys.exit(main())
