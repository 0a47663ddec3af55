"""Errors a user can mend: each says what was given, what was expected and what to do."""

import errno
from signal import Signals


class RunError(Exception):
    """This run cannot start or go on; the message is for the user and needs no traceback."""


class UsageError(RunError):
    """The command line is wrong."""


class AgreedError(RunError):
    """A `RunError` that every rank raises with the same message, so that one of them prints it."""


class Stopped(Exception):  # noqa: N818 - an end, not an error
    """A signal asked for the end, and all ranks have written a checkpoint at the same step."""

    def __init__(self, number: int, step: int) -> None:
        super().__init__(f"stopped by {Signals(number).name} after step {step}, with a checkpoint: --resume goes on")
        self.number = number


class DamagedError(RunError):
    """A file of a checkpoint is missing, or is not what was written."""


NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
GO_ON, START_AGAIN = "go on with --resume", "start again"  # once there is room


def told(error: RunError | OSError, *, advice: str = GO_ON) -> str:
    """Message for the user: names the file of a system's error, and on a full disk says what to do."""
    if isinstance(error, RunError):
        return str(error)
    what = str(error.strerror or error or type(error).__name__)
    named = f"{error.filename}: {what}" if error.filename is not None else what
    return f"{named}: make room, then {advice}" if error.errno in NO_SPACE else named
