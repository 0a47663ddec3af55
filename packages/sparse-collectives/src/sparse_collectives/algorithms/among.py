"""A schedule of a whole group, carried by some of the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from communicators import Elapse, Received, Round, Schedule

from sparse_collectives.wire import InvalidMessageError

T = TypeVar("T")


def among(ranks: Sequence[int], schedule: Schedule[T]) -> Schedule[T]:
    """A schedule that names its peers 0 … len(ranks) − 1, carried by `ranks`, which are distinct.

        yield from among([3, 7, 11], gtopk(sparse, 1, 3, k))        on rank 7

    The schedule's result.
    """
    positions = {rank: position for position, rank in enumerate(ranks)}
    try:
        action = next(schedule)
        while True:
            received: Received = yield _translated(action, ranks)
            action = schedule.send({positions[rank]: payload for rank, payload in (received or {}).items()})
    except StopIteration as stop:
        result: T = stop.value
        return result
    except InvalidMessageError as error:
        rank = None if error.rank is None else ranks[error.rank]
        raise InvalidMessageError(rank, error.problem) from error


def _translated(action: Round | Elapse, ranks: Sequence[int]) -> Round | Elapse:
    if isinstance(action, Elapse):
        return action
    return Round(
        {ranks[position]: payload for position, payload in action.sends.items()},
        {ranks[position]: capacity for position, capacity in action.recvs.items()},
        bounded=action.bounded,
    )
