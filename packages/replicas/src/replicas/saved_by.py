"""Rank that saved a state, and of how many: every rank saves its own, and loads its own."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from communicators import Communicator

KEY = "distributed"
"""Key of a wrapper's own part in its state_dict; the rest is the wrapped optimizer's."""


def saved_by(comm: Communicator, advice: str) -> dict[str, Any]:
    """Rank and number of ranks; the first key names the number too, for torch.distributed.checkpoint's missing keys.

    advice: what to do with a state of another number of ranks.
    """
    return {size_key(comm.size, advice): True, "rank": comm.rank, "world_size": comm.size}


def check_is_state(state: Any) -> None:
    """Raises TypeError or ValueError for anything that is no wrapper's state, before anybody looks into it."""
    given = "expected what state_dict() or gathered_state_dict() gave"
    if not isinstance(state, Mapping):
        raise TypeError(f"a state is {reprlib.repr(state)}, {given}: a dict with {KEY!r}")
    if not state:
        raise ValueError(
            f"an empty state given, {given}; gathered_state_dict() gives the whole one to rank 0 alone, {{}} to the "
            "others: save it there, and load that file on every rank"
        )
    if KEY in state and not isinstance(state[KEY], Mapping):
        raise ValueError(f"part {KEY!r} of the state is {reprlib.repr(state[KEY])}, {given}, where it is a dict")


def check_saved_by(
    state: Mapping[str, Any], rank: int, size: int, *, of: str, needs: tuple[str, ...], advice: str, one_file: str = ""
) -> None:
    """Raises ValueError unless the state holds a part of this rank and this world size with all that it needs.

    of: who writes such states; needs: keys besides rank and world size. one_file: what to do where rank 0 alone writes.
    """
    if KEY not in state:
        raise ValueError(
            f"a state with the keys {sorted(map(str, state))} given, expected one of {of}, with {KEY!r}; give a plain "
            "optimizer's state to the wrapped optimizer"
        )
    own = state[KEY]
    if lacking := [key for key in ("rank", "world_size", *needs) if key not in own]:
        raise ValueError(f"the state lacks {lacking}: it was cut, or is no state of {of}")
    if own["world_size"] != size:
        raise ValueError(f"the state is of {own['world_size']} ranks, but there are {size} now: {advice}")
    if own["rank"] != rank:
        raise ValueError(
            f"the state of rank {own['rank']} given to rank {rank}: every rank saves and loads its own{one_file}"
        )


def size_key(size: int, advice: str) -> str:
    """The key that names the number of ranks."""
    return f"of {size} ranks; {advice}"
