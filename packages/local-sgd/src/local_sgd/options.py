"""Options that all algorithms of the family take."""

from __future__ import annotations

from typing import Any, TypedDict

import torch
from torch import nn

from local_sgd.settings import policy, whole


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


def check_options(*, buffers: str, inner_state: str, bucket_bytes: int | None, model: nn.Module | None) -> None:
    """Raises TypeError or ValueError for unknown options, and for some that exclude each other."""
    policy("buffers", buffers, "keep", "average", "broadcast")
    policy("inner_state", inner_state, "keep", "average", "reset")
    if bucket_bytes is not None:
        whole("bucket_bytes", bucket_bytes, ", or None")
    if buffers != "keep" and model is None:
        raise ValueError(f"buffers={buffers!r} takes the model whose buffers they are: give model=")
