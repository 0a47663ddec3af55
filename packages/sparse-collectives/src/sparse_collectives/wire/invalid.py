"""Bytes from another rank that are no message as agreed: said of whom they are, and never used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class InvalidMessageError(ValueError):
    """rank: whose bytes they are, as the schedule numbers its peers; None where it is what several gave together."""

    def __init__(self, rank: int | None, problem: str) -> None:
        whose = "what the ranks gave together" if rank is None else f"rank {rank} gave what"
        super().__init__(f"{whose} is no valid message: {problem}")
        self.rank, self.problem = rank, problem


@contextmanager
def given_by(rank: int) -> Iterator[None]:
    """A ValueError inside is said to be of this rank's bytes.

    Args:
        rank: As the schedule numbers its peers.

    Raises:
        InvalidMessageError: In place of the ValueError, which it is.
    """
    try:
        yield
    except InvalidMessageError:
        raise
    except ValueError as error:
        raise InvalidMessageError(rank, str(error)) from error
