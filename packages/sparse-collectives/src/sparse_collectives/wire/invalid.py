"""Invalid messages from another rank: the error names the sender, and the bytes are never used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class InvalidMessageError(ValueError):
    """Invalid bytes. rank: their sender, as the schedule numbers its peers; None if several ranks made them."""

    def __init__(self, rank: int | None, problem: str) -> None:
        whose = "what the ranks gave together" if rank is None else f"rank {rank} gave what"
        super().__init__(f"{whose} is no valid message: {problem}")
        self.rank, self.problem = rank, problem


@contextmanager
def blame_rank(rank: int) -> Iterator[None]:
    """Context that blames a rank's bytes for a ValueError, by raising an InvalidMessageError, which is one, instead.

    Args:
        rank: As the schedule numbers its peers.
    """
    try:
        yield
    except InvalidMessageError:
        raise
    except ValueError as error:
        raise InvalidMessageError(rank, str(error)) from error
