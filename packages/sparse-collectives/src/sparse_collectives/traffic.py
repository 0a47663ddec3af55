"""What a rank sends in one collective, known beforehand."""

from __future__ import annotations

from typing import NamedTuple


class Traffic(NamedTuple):
    """nbytes: bytes that this rank sends, headers included; messages: in so many; rounds: that it takes part in."""

    nbytes: int
    messages: int
    rounds: int
