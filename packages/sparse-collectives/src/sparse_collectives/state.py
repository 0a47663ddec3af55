"""What an algorithm keeps between calls."""

from __future__ import annotations

from typing import Any, TypeAlias

State: TypeAlias = dict[str, Any]
"""Plain values, lists and tensors; changed in place, and only when a collective has succeeded.

One state serves one call at a time: the next call begins when the last has ended.
"""
