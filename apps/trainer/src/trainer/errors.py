"""Errors a user can mend: each says what was given, what was expected and what to do."""


class RunError(Exception):
    """This run cannot start or go on; the message is for the user and needs no traceback."""


class AgreedError(RunError):
    """A `RunError` that every rank raises with the same message, so that one of them prints it."""


class DamagedError(RunError):
    """A file of a checkpoint is missing, or is not what was written."""
