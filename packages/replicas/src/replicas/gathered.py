"""The states of all ranks in one: for a checkpoint that rank 0 alone writes."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from communicators import CollectiveError, Communicator, Payload, Round, Schedule, allgather, run
from torch import Tensor

from replicas.saved_by import KEY, check_is_state, size_key

CHUNK_BYTES = 1 << 24
"""Most bytes of a message: rank 0 takes one at a time from one rank after the other."""
RANKS = "ranks"
"""Key, in the own part of a gathered state, of what each rank adds to the rest."""


def gather_states(attempt: Callable[[], Mapping[str, Any]], comm: Communicator) -> list[dict[str, Any]] | None:
    """Every rank's state in rank order, copied, on the CPU, on rank 0; None elsewhere. For every rank to call.

    Beside the states rank 0 holds one more of them in bytes, the others their own.

    Args:
        attempt: Gives this rank's state: tensors and plain values.
        comm: The ranks.

    Raises:
        CollectiveError: On every other rank where one rank's attempt raises; that rank raises what it raised.
    """
    packed, failed = [torch.zeros(0, dtype=torch.uint8)], None
    try:
        packed = [_packed(attempt())]
    except Exception as error:  # whatever it is, the others must not wait for it
        failed = error
    nbytes = _agree("" if failed is None else f"{type(failed).__name__}: {failed}", packed[0].numel(), failed, comm)
    schedule = _to_first(packed, nbytes, comm.rank)
    return run(schedule, comm, facts=f"gather_states of {sum(nbytes)} bytes", device=torch.device("cpu"))


def gathered_state(
    take: Callable[[], Mapping[str, Any]], comm: Communicator, *, advice: str, alike: bool
) -> dict[str, Any]:
    """A wrapper's states of all ranks in one on rank 0, {} elsewhere; for every rank to call. See `of_rank`.

    Args:
        take: Gives this rank's state.
        comm: The ranks.
        advice: What to do with a state of another number of ranks.
        alike: Whether the wrapped optimizer's state is the same on all ranks, and held once.

    Raises:
        CollectiveError: `take` raises on another rank, which is named.
    """

    def own() -> Mapping[str, Any]:
        state = take()
        return {KEY: state[KEY]} if alike and comm.rank else state

    states = gather_states(own, comm)
    if states is None:
        return {}
    if not alike:
        return gathered({}, states, advice)
    wrapped = {key: value for key, value in states[0].items() if key != KEY}
    return gathered(wrapped, [{KEY: state[KEY]} for state in states], advice)


def gathered(shared: Mapping[str, Any], states: Sequence[Mapping[str, Any]], advice: str) -> dict[str, Any]:
    """One state out of what all ranks have alike and what each adds to it or has otherwise; see `of_rank`."""
    return {**shared, KEY: {size_key(len(states), advice): True, "world_size": len(states), RANKS: list(states)}}


def of_rank(state: Mapping[str, Any], rank: int, size: int, *, advice: str) -> Mapping[str, Any]:
    """This rank's own state out of a gathered one; any other state as it is.

    Raises:
        TypeError: It is no state at all.
        ValueError: The state is of another number of ranks, or empty.
    """
    check_is_state(state)
    if not is_gathered(state):
        return state
    if (saved := len(state[KEY][RANKS])) != size:
        raise ValueError(f"the state holds those of {saved} ranks, but there are {size} now: {advice}")
    return of_all(state)[rank]


def of_all(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The states of all ranks out of a gathered one, in rank order."""
    shared = {key: value for key, value in state.items() if key != KEY}
    return [{**shared, **own} for own in state[KEY][RANKS]]


def is_gathered(state: Any) -> bool:
    """Whether a state holds those of several ranks."""
    own = state.get(KEY) if isinstance(state, Mapping) else None
    return isinstance(own, Mapping) and isinstance(own.get(RANKS), Sequence)


def _agree(reason: str, nbytes: int, failed: Exception | None, comm: Communicator) -> list[int]:
    """Sizes of all ranks' states, or an error on all ranks."""
    said = torch.frombuffer(bytearray(f"{nbytes} {reason}".encode(errors="replace")), dtype=torch.uint8)
    all_said = [bytes(each.tolist()).decode().partition(" ") for each in allgather(said, comm)]
    if failed is not None:
        raise failed
    for rank, (_, _, reason) in enumerate(all_said):
        if reason:
            raise CollectiveError(f"rank {rank} cannot give its state: {reason}")
    return [int(size) for size, _, _ in all_said]


def _to_first(packed: list[Tensor], nbytes: Sequence[int], rank: int) -> Schedule[list[dict[str, Any]] | None]:
    """Gathers states on rank 0, which takes all of one rank, then all of the next; a rank that has sent is done.

    packed: this rank's, taken out, so that nobody else keeps its memory.
    """
    own = packed.pop()
    if rank:
        for chunk in torch.split(own, CHUNK_BYTES):
            yield Round(sends={0: Payload.of(chunk)})
        return None
    states = [_loaded(io.BytesIO(own.numpy().data))]
    del own
    for source in range(1, len(nbytes)):
        file = io.BytesIO()
        for begin in range(0, nbytes[source], CHUNK_BYTES):
            coming = min(CHUNK_BYTES, nbytes[source] - begin)
            received = yield Round(recvs={source: coming})
            file.write(received[source].body.numpy().data)
        states.append(_loaded(file))
    return states


def _packed(state: Mapping[str, Any]) -> Tensor:
    file = io.BytesIO()
    torch.save(dict(state), file)
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)


def _loaded(file: io.BytesIO) -> dict[str, Any]:
    """State in a file, on the CPU wherever it was before."""
    file.seek(0)
    state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    return state
