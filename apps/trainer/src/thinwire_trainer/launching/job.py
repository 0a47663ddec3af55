"""One program on its ranks: on those that a launcher has started, else on workers of its own."""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from thinwire_trainer.errors import RunError
from thinwire_trainer.launching.ending import StopRequest, exit_code, stoppable
from thinwire_trainer.launching.placement import Placement, placement
from thinwire_trainer.launching.workers import start_workers

WRONG_USAGE = 2


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a command line asks for.

    Attributes:
        workers: How many to start where no launcher has started any.
        oversubscribe: They may be more than the cores can bear.
        work: One rank's part.
        afterwards: Called once workers that were started here have ended well.
    """

    workers: int
    work: Callable[[], None]
    oversubscribe: bool = False
    afterwards: Callable[[], None] = lambda: None


def run_job(module: str, argv: Sequence[str], asked: Callable[[Placement, StopRequest], Job]) -> int:
    """Does this process's part, to its exit code: starts the workers and waits for them, or is one of the ranks.

    Args:
        module: Of `python -m MODULE ARGV`, and the name in messages.
        argv: The command line, for the workers.
        asked: Makes a job of it. Its RunError is a wrong command line: the same on all ranks under MPI, and rank 0 says
            it; elsewhere the first of each machine.

    Returns:
        That of the workers or of `exit_code`; 2 for a wrong command line.
    """
    place = placement(os.environ)
    with stoppable(place, program=module) as request:
        try:
            job = asked(place, request)
            if place.launcher is None and job.workers > 1:
                code = start_workers(module, argv, job.workers, oversubscribe=job.oversubscribe)
                if code == 0:
                    job.afterwards()
                return code
        except RunError as error:
            if (place.rank if place.uses_mpi else place.local_rank) == 0:
                print(f"{module}: error: {error}", file=sys.stderr, flush=True)
            return WRONG_USAGE
        return exit_code(job.work, place, program=module)
