"""What all algorithms of the family take."""

from __future__ import annotations

from typing import Any, TypedDict

import torch
from torch import nn


class Options(TypedDict, total=False):
    """Keyword arguments of `PeriodicAveraging`, which describes them."""

    comm: Any
    model: nn.Module | None
    buffers: str
    inner_state: str
    weighted: bool
    broadcast: bool
    native: bool
    bucket_bytes: int | None
    anchor_device: torch.device | str | None
