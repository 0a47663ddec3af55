"""States in a checkpoint: each rank's own, or those of all ranks in one for rank 0 alone to write."""

import io
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from communicators import CollectiveError, Communicator, Payload, Round, Schedule, allgather, broadcast, run
from torch import Tensor

STATE_KEY = "distributed"
"""Key of a wrapper's own part in its state_dict; the rest is the wrapped optimizer's."""
CHUNK_BYTES = 1 << 24
"""Most bytes of a message: rank 0 takes one at a time from one rank after the other."""
_RANKS = "ranks"
"""Key, in the own part of a gathered state, of all ranks' parts."""
_GIVEN = "expected what state_dict() or gathered_state_dict() gave"


def saved_by(rank: int, size: int, advice: str) -> dict[str, Any]:
    """Entries of a wrapper's own part of a state: the rank that saves it, and of how many.

        {**optimizer.state_dict(), STATE_KEY: {**saved_by(comm.rank, comm.size, advice), "steps": 100}}

    Args:
        rank: Rank that saves.
        size: Number of ranks.
        advice: Remedy for a state of another number of ranks. It stands in a key, which torch.distributed.checkpoint
            names where it does not find it.
    """
    return {_size_key(size, advice): True, "rank": rank, "world_size": size}


def check_saved_by(
    state: Mapping[str, Any], rank: int, size: int, *, of: str, needs: Sequence[str], advice: str, one_file: str = ""
) -> dict[str, Any]:
    """Checks that a state has an own part that this rank saved, among as many ranks; returns that part.

    Args:
        state: A rank's own state.
        rank: This rank.
        size: Number of ranks.
        of: Writer of such states, such as "an EagerSGD".
        needs: Keys that the part must have.
        advice: Remedy for a state of another number of ranks.
        one_file: Remedy where rank 0 alone has saved.

    Raises:
        ValueError: The state is of another rank or number of ranks, or lacks a key.
    """
    if STATE_KEY not in state:
        raise ValueError(
            f"a state with the keys {sorted(map(str, state))} given, expected one of {of}, with {STATE_KEY!r}; give a "
            "plain optimizer's state to the wrapped optimizer"
        )
    own: dict[str, Any] = state[STATE_KEY]
    if lacking := [key for key in ("rank", "world_size", *needs) if key not in own]:
        raise ValueError(f"the state lacks {lacking}: it was cut, or is no state of {of}")
    if own["world_size"] != size:
        raise ValueError(f"the state is of {own['world_size']} ranks, but there are {size} now: {advice}")
    if own["rank"] != rank:
        raise ValueError(
            f"the state of rank {own['rank']} given to rank {rank}: every rank saves and loads its own{one_file}"
        )
    return own


def gathered_state(
    take: Callable[[], Mapping[str, Any]], comm: Communicator, *, advice: str, alike: bool
) -> dict[str, Any]:
    """All ranks' states in one, copied, in the CPU's memory, on rank 0; {} elsewhere. Every rank calls it.

        whole = gathered_state(optimizer.state_dict, comm, advice="go on with as many ranks", alike=False)

    Beside the states rank 0 holds one more of them in bytes, the others their own.

    Args:
        take: Gives this rank's state: tensors and plain values.
        comm: The ranks.
        advice: Remedy for a state of another number of ranks.
        alike: Whether all but the own part is the same on all ranks, and so is held once.

    Raises:
        CollectiveError: `take` raises on another rank, which is named; that rank raises what it raised.
    """

    def own() -> Mapping[str, Any]:
        state = take()
        return {STATE_KEY: state[STATE_KEY]} if alike and comm.rank else state

    states = gather_states(own, comm)
    if states is None:
        return {}
    shared = {key: value for key, value in states[0].items() if alike and key != STATE_KEY}
    parts = [{STATE_KEY: state[STATE_KEY]} for state in states] if alike else states
    return {**shared, STATE_KEY: {_size_key(len(states), advice): True, "world_size": len(states), _RANKS: parts}}


def state_of_rank(
    state: Mapping[str, Any], rank: int, size: int, *, advice: str, anyones: str = ""
) -> Mapping[str, Any]:
    """This rank's own state out of a gathered one; any other state as it is.

    Args:
        state: Result of `gathered_state` on rank 0, or a rank's own.
        rank: This rank.
        size: Number of ranks.
        advice: Remedy for a state of another number of ranks.
        anyones: Key of the own parts that is True where a state is good for any rank of any number: rank 0's is taken
            where there are more or fewer ranks now.

    Raises:
        TypeError: It is no state at all.
        ValueError: The state is of another number of ranks, or empty.
    """
    check_is_state(state)
    states = states_of_ranks(state)
    if states is None:
        return state
    if len(states) != size:
        if states and states[0].get(STATE_KEY, {}).get(anyones) is True:
            return states[0]
        raise ValueError(f"the state holds those of {len(states)} ranks, but there are {size} now: {advice}")
    return states[rank]


def states_of_ranks(state: Any) -> list[dict[str, Any]] | None:
    """The states of all ranks out of a gathered one, in rank order; None where the state is no gathered one.

    Args:
        state: Result of `gathered_state` on rank 0, or anything else.
    """
    own = state.get(STATE_KEY) if isinstance(state, Mapping) else None
    if not (isinstance(own, Mapping) and isinstance(own.get(_RANKS), Sequence)):
        return None
    shared = {key: value for key, value in state.items() if key != STATE_KEY}
    return [{**shared, **part} for part in own[_RANKS]]


def gather_states(attempt: Callable[[], Mapping[str, Any]], comm: Communicator) -> list[dict[str, Any]] | None:
    """Every rank's state in rank order on rank 0, None elsewhere; raises as `gathered_state` does."""
    packed, nbytes = _all_packed(attempt, comm)
    schedule = _to_first(packed, nbytes, comm.rank)
    return run(schedule, comm, facts=f"gather_states of {sum(nbytes)} bytes", device=torch.device("cpu"))


def broadcast_state(
    take: Callable[[], Mapping[str, Any]], comm: Communicator, *, root: int, device: torch.device
) -> dict[str, Any]:
    """One rank's state, copied, on all ranks, its own too. Every rank calls it.

        held = broadcast_state(optimizer.state_dict, comm, root=0, device=torch.device("cpu"))

    Args:
        take: Gives the state: tensors and plain values. Called by the root alone.
        comm: The ranks.
        root: Rank whose state it is.
        device: Device of this rank, for tensors that the root has on an accelerator; others come to the CPU.

    Raises:
        CollectiveError: On all ranks: the state holds something else. Or `take` raises on the root, which raises what
            it raised.
    """
    packed, nbytes = _all_packed(take if comm.rank == root else dict, comm)
    own = packed.pop() if comm.rank == root else torch.empty(nbytes[root], dtype=torch.uint8, device="cpu")
    received = broadcast(own, comm, root=root)
    try:
        return _loaded(io.BytesIO(received.numpy().data), device)
    except Exception as error:  # objects of a user's own fail anywhere
        raise CollectiveError(
            f"the state of rank {root} cannot be read ({type(error).__name__}): expected tensors and plain values"
        ) from error


def check_is_state(state: Any) -> None:
    """Raises TypeError or ValueError for anything that is no wrapper's state, before anybody looks into it."""
    if not isinstance(state, Mapping):
        raise TypeError(f"a state is {reprlib.repr(state)}, {_GIVEN}: a dict with {STATE_KEY!r}")
    if not state:
        raise ValueError(
            f"an empty state given, {_GIVEN}; gathered_state_dict() gives the whole one to rank 0 alone, {{}} to the "
            "others: save it there, and load that file on every rank"
        )
    if STATE_KEY in state and not isinstance(state[STATE_KEY], Mapping):
        raise ValueError(
            f"part {STATE_KEY!r} of the state is {reprlib.repr(state[STATE_KEY])}, {_GIVEN}, where it is a dict"
        )


def _size_key(size: int, advice: str) -> str:
    return f"of {size} ranks; {advice}"


def _all_packed(attempt: Callable[[], Mapping[str, Any]], comm: Communicator) -> tuple[list[Tensor], list[int]]:
    """This rank's state as bytes, to be taken out of the list, and all ranks' sizes; or an error on all ranks."""
    packed, failed = [torch.zeros(0, dtype=torch.uint8, device="cpu")], None
    try:
        packed = [_packed(attempt())]
    except Exception as error:  # whatever it is, the others must not wait for it
        failed = error
    nbytes = _agree("" if failed is None else f"{type(failed).__name__}: {failed}", packed[0].numel(), failed, comm)
    return packed, nbytes


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


def _loaded(file: io.BytesIO, device: torch.device | None = None) -> dict[str, Any]:
    """State in a file; what was on an accelerator comes to the device, or without one to the CPU as all else."""

    def place(storage: Any, saved_on: str) -> Any:
        return storage if device is None or saved_on == "cpu" else storage.to(device=device)

    file.seek(0)
    state: dict[str, Any] = torch.load(file, map_location=place, weights_only=True)
    return state
