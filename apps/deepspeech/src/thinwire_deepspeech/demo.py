"""`python -m thinwire_deepspeech.demo`: 2 MPI workers learn spoken digits (synthetic) by dense and sparse gradients."""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from thinwire_trainer.command_line import quantities
from thinwire_trainer.launching.ending import StopRequest
from thinwire_trainer.launching.placement import Placement, joined
from thinwire_trainer.launching.workers import Job, run_job


def main(argv: Sequence[str] | None = None) -> int:
    """Start the workers and be done, or be one of them; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    given = _flags(argv)
    workers = 1 if given.simulated else given.nworkers

    def job(place: Placement, request: StopRequest) -> Job:  # without checkpoints there is nothing to stop for
        return Job(workers=workers, oversubscribe=given.oversubscribe, work=partial(_work, given, place))

    return run_job("thinwire_deepspeech.demo", argv, job)


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


def _work(given: Namespace, place: Placement) -> None:
    from communicators import SimulatedWorld
    from thinwire_trainer.launching.device import own_device  # brings torch

    from thinwire_deepspeech.comparison import compare

    output, device = given.output, own_device(place.local_rank)
    part = partial(
        compare, epochs=given.max_epochs, seeds=given.seeds, data_dir=given.data_dir, output=output, device=device
    )
    if given.simulated:
        SimulatedWorld(given.nworkers).run(part)
        return
    with joined(place) as comm:
        part(comm)


if __name__ == "__main__":
    sys.exit(main())
