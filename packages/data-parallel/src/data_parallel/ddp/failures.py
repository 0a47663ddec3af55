"""Errors of exchanges, raised out of backward() with their type.

DDP makes a RuntimeError of whatever a hook's future raises, with the text of every callback on its way. What autograd
calls at the end of a backward keeps its type. So a future whose exchange failed gives the gradient, DDP ends its own
part of the backward, and then the error is raised.
"""

from __future__ import annotations

import torch

from data_parallel.hsdp.backward import at_the_end


class Failures:
    """Errors of one backward's buckets: the first is raised when DDP has ended it."""

    def __init__(self) -> None:
        self._error: Exception | None = None

    def raised_at_the_end(self, *, last: bool) -> bool:
        """Whether `add` will do in this bucket's exchange: not outside a backward, as in DDP's `join()`.

        Args:
            last: This is the last bucket: DDP ends in the same backward, of several that are nested by a checkpoint.
        """
        if torch._C._current_graph_task_id() == -1:
            return False
        if last:
            queue = at_the_end()
            queue(lambda: queue(self._raise))  # twice, because DDP queues its own end after the last bucket
        return True

    def add(self, error: Exception) -> None:
        """Keeps an error; the first one is raised."""
        self._error = self._error or error

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error
