"""`python -m thinwire_cifar.demo`: 4 MPI workers learn real digits with ResNet-20, by dense and by sparse gradients."""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from thinwire_trainer.command_line import quantities
from thinwire_trainer.errors import RunError
from thinwire_trainer.launching.ending import StopRequest
from thinwire_trainer.launching.placement import Placement, joined
from thinwire_trainer.launching.workers import Job, run_job

from thinwire_cifar import behind_link


def main(argv: Sequence[str] | None = None) -> int:
    """Start the workers and be done, or be one of them; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    given = _flags(argv)

    def told() -> None:
        print(behind_link.shown(behind_link.measured(given.nworkers)), flush=True)

    def job(place: Placement, request: StopRequest) -> Job:  # without checkpoints there is nothing to stop for
        if (place.size if place.launcher else given.nworkers) < 2:
            raise RunError("one worker has nobody to exchange gradients with: give --nworkers 2 or more")
        work = partial(_work, given, place)
        return Job(workers=given.nworkers, oversubscribe=given.oversubscribe, work=work, afterwards=told)

    return run_job("thinwire_cifar.demo", argv, job)


def _flags(argv: Sequence[str]) -> Namespace:
    parser = ArgumentParser(prog="python -m thinwire_cifar.demo", description=__doc__)
    parser.add_argument("--nworkers", type=quantities.count, default=4, help="default: 4")
    parser.add_argument("--oversubscribe", action="store_true", help="more workers than the cores can bear")
    parser.add_argument("--max-epochs", type=quantities.count, default=20, help="default: 20")
    parser.add_argument("--seed", type=quantities.seed, default=0, help="default: 0")
    parser.add_argument("--output", type=Path, default=Path("runs/demo"), metavar="DIR", help="default: runs/demo")
    return parser.parse_args(argv)


def _work(given: Namespace, place: Placement) -> None:
    from thinwire_trainer.launching.device import own_device  # brings torch

    from thinwire_cifar.comparison import compare

    device = own_device(place.local_rank)
    with joined(place) as comm:
        compare(comm, epochs=given.max_epochs, seed=given.seed, output=given.output, device=device)


if __name__ == "__main__":
    sys.exit(main())
