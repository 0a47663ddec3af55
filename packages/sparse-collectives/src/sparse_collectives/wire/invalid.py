"""Bytes from another rank that are no message as agreed: said of whom they are, and never used."""

from __future__ import annotations

from types import TracebackType


class InvalidMessageError(ValueError):
    """rank: whose bytes they are, as the schedule numbers its peers; None where it is what several gave together."""

    def __init__(self, rank: int | None, problem: str) -> None:
        whose = "what the ranks gave together" if rank is None else f"rank {rank} gave what"
        super().__init__(f"{whose} is no valid message: {problem}")
        self.rank, self.problem = rank, problem


class given_by:  # noqa: N801 - reads as what it does
    """A ValueError inside is said to be of this rank's bytes: an InvalidMessageError takes its place, which is one.

    Args:
        rank: As the schedule numbers its peers.
    """

    __slots__ = ("_rank",)

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if isinstance(error, ValueError) and not isinstance(error, InvalidMessageError):
            raise InvalidMessageError(self._rank, str(error)) from error
