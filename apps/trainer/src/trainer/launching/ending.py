"""How a run ends: one message for what a user can mend, a traceback for what is our fault, never a hang."""

import sys
import traceback
from collections.abc import Callable

from communicators import CollectiveError, leave

from trainer.errors import AgreedError, RunError
from trainer.launching.placement import Placement


def exit_code(work: Callable[[], None], place: Placement, *, program: str) -> int:
    """Do the work and return 0, or say why it failed and return 1; a rank that fails alone ends the whole job."""
    try:
        work()
    except (AgreedError, CollectiveError) as error:  # all ranks have the same message
        if place.rank == 0:
            complain(program, error)
        if place.uses_mpi and leave():  # MPI's own end would wait for those that do not answer
            _abort(place)
        return 1
    except RunError as error:
        complain(program, error)
    except Exception:
        traceback.print_exc()
    else:
        return 0
    _abort(place)
    return 1


def complain(program: str, error: Exception | str) -> None:
    """The message on standard error, in one line."""
    print(f"{program}: error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)


def _abort(place: Placement) -> None:
    """End the other ranks too, which would otherwise wait for this one; torchrun does so by itself."""
    if place.uses_mpi and place.size > 1:
        from mpi4py import MPI

        sys.stderr.flush()
        MPI.COMM_WORLD.Abort(1)
