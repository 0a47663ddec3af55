"""Reasons why a collective cannot proceed, as every rank says them."""

import re


class CollectiveError(RuntimeError):
    """A collective failed, on every rank with the same reason; its communicator is not usable any more.

    It is raised where ranks wait in a call of ours. A rank that waits in a call of MPI's own, such as MPI.Barrier, is
    not told: start programs by `mpiexec -n P python -m mpi4py train.py`, where an uncaught exception on any rank ends
    all of them, even those that could not leave MPI because others do not answer (see `leave`).
    """


def mismatch(number: int, rank: int, facts: str, other: int, other_facts: str) -> str:
    """Reason for two ranks that entered the same call with different facts; the lower rank is named first."""
    (rank, facts), (other, other_facts) = sorted([(rank, facts), (other, other_facts)])
    return (
        f"ranks disagree on call {number}: rank {rank} calls {facts}, rank {other} calls {other_facts}; "
        "every rank must make the same calls in the same order with the same settings"
    )


def reason(rank: int, facts: str, error: BaseException) -> str:
    """Reason for an exception that a schedule raised on one rank: a CollectiveError speaks for all of them already."""
    return str(error) if isinstance(error, CollectiveError) else failed(rank, facts, error)


def failed(rank: int, facts: str, error: BaseException) -> str:
    """Reason for one rank's own error."""
    return f"rank {rank} failed in {facts}: {describe(error)}"


def left(rank: int, why: str, waiting: str) -> str:
    """Reason for a rank that went away while another one still waits for it."""
    return f"rank {rank} left ({why}) while {waiting}"


def lost(rank: int) -> str:
    """Reason for a rank that has died, or whose network has."""
    return f"rank {rank} is gone: its connection was lost"


def is_loss(reason: str) -> bool:
    """Whether a reason is that a rank has died, left or not come in time, so that others could go on without it.

    Who is ended from outside, by ctrl-C or by a handler of SIGTERM, leaves: that is no error of what it did.
    """
    losses = " is gone: its connection", " left (", "transport failed"
    ended = re.search(r": (KeyboardInterrupt|SystemExit)\b[^:]*$", reason) is not None
    return reason.startswith("timed out") or ended or any(loss in reason for loss in losses)


def describe(error: BaseException) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
