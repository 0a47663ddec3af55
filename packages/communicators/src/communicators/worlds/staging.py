"""Payloads of a GPU on their way through host memory."""

from __future__ import annotations

import numpy as np
import torch

from communicators.schedule import SLOT_BYTES, Payload


def host_payload(nbytes: int, device: torch.device) -> Payload:
    """An uninitialised payload in host memory, pinned if what it holds comes from, or goes to, a GPU of CUDA."""
    if device.type == "cuda":
        return Payload(torch.empty(SLOT_BYTES + nbytes, dtype=torch.uint8, pin_memory=True))
    return Payload(torch.from_numpy(np.empty(SLOT_BYTES + nbytes, dtype=np.uint8)))


def to_host(payload: Payload) -> Payload:
    """The payload in host memory: itself if it is there."""
    memory = payload.memory
    if memory.device.type == "cpu":
        return payload
    host = host_payload(payload.nbytes, memory.device)
    host.memory.copy_(memory)
    return host


def to_device(payload: Payload, device: torch.device) -> Payload:
    """The payload on a device: itself if it is there."""
    return payload if device.type == "cpu" else Payload(payload.memory.to(device))
