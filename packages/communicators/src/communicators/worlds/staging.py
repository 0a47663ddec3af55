"""Payloads of a GPU on their way through host memory."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def host_empty(nbytes: int, device: torch.device) -> Tensor:
    """An uninitialised buffer in host memory, pinned if what it holds comes from, or goes to, a GPU of CUDA."""
    if device.type == "cuda":
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    return torch.from_numpy(np.empty(nbytes, dtype=np.uint8))


def to_host(payload: Tensor) -> Tensor:
    """The payload in host memory: itself if it is there."""
    return payload if payload.device.type == "cpu" else host_empty(payload.numel(), payload.device).copy_(payload)
