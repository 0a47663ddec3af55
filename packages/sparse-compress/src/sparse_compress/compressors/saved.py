"""Saved state of compressors: numbers by name."""

from collections.abc import Mapping
from typing import Any


def by_name(state: Mapping[str, Any], part: str, *, integers: bool = False) -> dict[str, Any]:
    """``state[part]``: numbers from 0 on, by name; ValueError for anything else."""
    found = state.get(part) if isinstance(state, Mapping) else None
    kinds = int if integers else (int, float)
    if not isinstance(found, Mapping) or not all(
        isinstance(name, str) and isinstance(value, kinds) and value >= 0 for name, value in found.items()
    ):
        raise ValueError(f"the state of a compressor is {state!r}, expected {part!r} in it: numbers from 0 on, by name")
    return dict(found)
