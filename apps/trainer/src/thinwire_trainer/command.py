"""`python -m APP`: check the command line, start workers where no launcher has, run.

`python -m APP NAME …` is one of the app's own commands, for what was trained (`App.commands`): a function of the app
and the rest of the command line, on one process, that returns an exit code. For its flags there is
`thinwire_trainer.command_line.parser.Parser`, and for the model `trainer.trained`.
"""

import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pkgutil import resolve_name

from thinwire_trainer.app import App
from thinwire_trainer.command_line.flags import parse
from thinwire_trainer.command_line.options import Options
from thinwire_trainer.errors import AgreedError, RunError, UsageError, told
from thinwire_trainer.launching.ending import StopRequest, complain
from thinwire_trainer.launching.placement import Placement, first_complaint, joined, placement
from thinwire_trainer.launching.workers import WRONG_USAGE, Job, run_job


def main(app: App, argv: Sequence[str] | None = None) -> int:
    """Run the app and return the process's exit code: 0, 1 for a run that failed, 2 for a wrong command line.

    128 + the number of a signal that stopped it: after a checkpoint of all ranks where they train. Elsewhere, and where
    they cannot agree in time, the process ends at once, without returning from here.
    """
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in app.commands:
        return _command(app, argv[0], argv[1:], placement(os.environ))
    return run_job(app.module, argv, partial(_asked, app, argv))


def _asked(app: App, argv: Sequence[str], place: Placement, request: StopRequest) -> Job:
    options = _checked(app, argv, place)
    work = partial(_train, app, options, place, request)
    return Job(workers=options.nworkers, oversubscribe=options.oversubscribe, work=work)


def _command(app: App, name: str, argv: Sequence[str], place: Placement) -> int:
    """Run one of the app's own commands; returns its exit code."""
    program = f"{app.module} {name}"
    try:
        if place.launcher is not None:
            raise UsageError(f"python -m {program} runs on one process: start it without {place.launcher}")
        return _function(app.commands[name])(app, argv)
    except (RunError, OSError) as error:
        if place.rank == 0:
            complain(program, told(error))
        return WRONG_USAGE if isinstance(error, UsageError) else 1


def _function(name: str) -> Callable[[App, Sequence[str]], int]:
    """Find the command's function; RunError where there is none."""
    try:
        found: Callable[[App, Sequence[str]], int] = resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise RunError(f"App.commands names {name!r:.100}, which cannot be imported ({error})") from None
    if not callable(found):
        raise RunError(f"App.commands names {name!r:.100}, which is a {type(found).__name__}, expected a function")
    return found


def _train(app: App, options: Options, place: Placement, request: StopRequest) -> None:
    """One rank's run."""
    from communicators import CollectiveError, LeftOutError

    from thinwire_trainer.launching.device import own_device
    from thinwire_trainer.records.live import of_local_rank
    from thinwire_trainer.run import run

    options = replace(options, metrics=of_local_rank(options.metrics, place.local_rank))
    device = own_device(place.local_rank, "cuda" if options.backend == "nccl" else options.device)
    if options.elastic is None:
        with joined(place, options.backend) as comm:
            run(app, options, comm, device=device, request=request)
        return
    logging.basicConfig(format=f"{app.module}: %(message)s")  # who comes and goes
    try:
        with joined(place, elastic=options.elastic, at_least=options.at_least) as comm:
            run(app, options, comm, device=device)
    except LeftOutError as error:
        raise RunError(
            "the others have gone on without this rank, which was stopped, or cut off from them: start it again, by "
            "the same command, to join them anew"
        ) from error
    except (AgreedError, CollectiveError) as error:  # said on each of them: they have no terminal in common
        raise RunError(str(error)) from error


def _checked(app: App, argv: Sequence[str], place: Placement) -> Options:
    """The options, or RunError with the same message on every rank if they are wrong on any."""
    complaint, options = "", None
    try:
        options = parse(argv, app, world_size=place.size if place.launcher else None)
        if options.backend == "nccl" and (place.launcher is None or place.uses_mpi):
            raise RunError("--backend nccl is for ranks of torchrun, or srun without MPI: leave it out")
        if options.elastic is not None:
            _check_meeting(options.elastic, place)
        if options.device == "cuda" or options.backend == "nccl":
            from thinwire_trainer.launching.device import insist_on_gpu  # brings torch

            insist_on_gpu()
    except RunError as error:
        complaint = str(error)
    complaint = first_complaint(complaint, place)
    if options is None or complaint:
        raise RunError(complaint)
    return options


def _check_meeting(elastic: str, place: Placement) -> None:
    if place.uses_mpi:
        raise RunError(
            f"--elastic under {place.launcher}: MPI ends all ranks when one dies, and starts none later; start every "
            f"rank by itself, with torchrun, or with srun --mpi=none --no-kill"
        )
    if not elastic and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise RunError(
            "--elastic without an address is for torchrun: run `python -m communicators.elastic` on one machine, apart "
            "from all ranks, and give --elastic HOST:29400"
        )
