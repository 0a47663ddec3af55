"""State of a survivor on its way to a newcomer: a schedule between the two of them."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from communicators.schedule import Payload, Round, Schedule

CHUNK_BYTES = 1 << 24
"""Most bytes of a message."""


def give(packed: Tensor) -> Schedule[int]:
    """Gives packed bytes to the newcomer, rank 1 of two; returns how many they are."""
    yield Round({1: Payload.of(torch.tensor([packed.numel()]))})
    for chunk in torch.split(packed, CHUNK_BYTES):
        yield Round({1: Payload.of(chunk)})
    return packed.numel()


def take() -> Schedule[tuple[dict[str, Any], int]]:
    """Takes the state that rank 0 of two gives; returns it, and its bytes."""
    nbytes = int((yield Round(recvs={0: 8}))[0].view(torch.int64))
    file = io.BytesIO()
    while (left := nbytes - file.tell()) > 0:
        received = yield Round(recvs={0: min(CHUNK_BYTES, left)})
        file.write(received[0].body.numpy().data)
    file.seek(0)
    return torch.load(file, map_location="cpu", weights_only=True), nbytes


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
