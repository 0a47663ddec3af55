"""State of a survivor on its way to a newcomer: a schedule between the two of them."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from communicators.errors import CollectiveError
from communicators.schedule import Payload, Round, Schedule

CHUNK_BYTES = 1 << 24
"""Most bytes of a message."""


def give(packed: Tensor) -> Schedule[int]:
    """Gives packed bytes to the newcomer, rank 1 of two; returns how many they are."""
    yield Round({1: Payload.of(torch.tensor([packed.numel()], device="cpu"))})
    for begin in range(0, packed.numel(), CHUNK_BYTES):
        yield Round({1: Payload.of(packed[begin : begin + CHUNK_BYTES])})
    return packed.numel()


def take() -> Schedule[io.BytesIO]:
    """Takes the packed bytes that rank 0 of two gives."""
    nbytes = int((yield Round(recvs={0: 8}))[0].view(torch.int64))
    file = io.BytesIO()
    while (left := nbytes - file.tell()) > 0:
        received = yield Round(recvs={0: min(CHUNK_BYTES, left)})
        file.write(received[0].body.numpy().data)
    return file


class UnreadableError(CollectiveError):
    """A state for a newcomer is none."""

    def __init__(self, why: object) -> None:
        super().__init__(
            f"the state that came for this newcomer cannot be read ({why}): expected tensors and plain values, as "
            "state_dict() of whatever is carried must give; or bits were changed on the way"
        )


def unpacked(file: io.BytesIO) -> dict[str, Any]:
    """State of what `packed` gave. UnreadableError for all else; nothing is unpickled but tensors and plain values."""
    file.seek(0)
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # bytes that were changed, or objects of a user's own, fail anywhere
        raise UnreadableError(type(error).__name__) from error
    kinds = {"own": dict, "carried": list, "dealer": dict}
    if not isinstance(state, dict) or not all(isinstance(state.get(name), kind) for name, kind in kinds.items()):
        raise UnreadableError("it has other parts")
    return state


def state_of(held: Any) -> dict[str, Any]:
    """State of what a user carries; a scheduler has written some of it into its optimizer's groups."""
    groups = [{key: value for key, value in group.items() if key != "params"} for group in _groups(held)]
    return {"state": held.state_dict(), "groups": groups}


def restore(held: Any, state: Mapping[str, Any]) -> None:
    """Restores what `state_of` gave."""
    held.load_state_dict(state["state"])
    for group, kept in zip(_groups(held), state["groups"], strict=True):
        group.update(kept)


def _groups(held: Any) -> Sequence[dict[str, Any]]:
    return getattr(getattr(held, "optimizer", None), "param_groups", ())


def packed(state: dict[str, Any]) -> Tensor:
    """A state as bytes, in memory of their own."""
    file = io.BytesIO()
    torch.save(state, file)
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
