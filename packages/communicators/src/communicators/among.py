"""A schedule of some ranks, which count from 0 inside, as one of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from communicators.schedule import Elapse, Received, Round, Schedule

T = TypeVar("T")


def among(schedule: Schedule[T], members: Sequence[int], facts: str) -> Schedule[T]:
    """The schedule with the ranks `members`, in order, in place of 0, 1, …; facts: for errors."""
    positions = {member: position for position, member in enumerate(members)}
    received: Received | None = None
    try:
        while True:
            try:
                action = next(schedule) if received is None else schedule.send(received)
            except StopIteration as stop:
                result: T = stop.value
                return result
            received = {
                positions[member]: payload for member, payload in (yield _named(action, members, facts)).items()
            }
    finally:
        schedule.close()


def _named(action: Round | Elapse, members: Sequence[int], facts: str) -> Round | Elapse:
    if not isinstance(action, Round):
        return action
    if strangers := [peer for peer in (*action.sends, *action.recvs) if not 0 <= peer < len(members)]:
        raise ValueError(f"{facts}: a group of {len(members)} ranks has no ranks {strangers}")
    sends = {members[peer]: payload for peer, payload in action.sends.items()}
    recvs = {members[peer]: nbytes for peer, nbytes in action.recvs.items()}
    return Round(sends, recvs, bounded=action.bounded)
