"""Invalid messages from another rank: the error names the sender, and the bytes are never used."""

from __future__ import annotations

from types import TracebackType


class InvalidMessageError(ValueError):
    """Invalid bytes. rank: their sender, as the schedule numbers its peers; None if several ranks made them."""

    def __init__(self, rank: int | None, problem: str) -> None:
        whose = "what the ranks gave together" if rank is None else f"rank {rank} gave what"
        super().__init__(f"{whose} is no valid message: {problem}")
        self.rank, self.problem = rank, problem


class given_by:  # noqa: N801 - reads as what it does
    """Context that blames a rank's bytes for a ValueError, by raising an InvalidMessageError, which is one, instead.

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
