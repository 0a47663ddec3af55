"""Errors a user can mend: each says what was given, what was expected and what to do."""

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
