"""Settings that all algorithms of the family take, and checks of a user's numbers."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, TypeAlias, TypedDict

import torch
from torch import nn

Every: TypeAlias = int | Callable[[int], int]
"""τ, or a function that gives it from the number of steps before the block."""


class Settings(TypedDict, total=False):
    """Keyword arguments of `PeriodicAveraging`, which describes them."""

    comm: Any
    model: nn.Module | None
    buffers: str
    inner_state: str
    weighted: bool
    broadcast: bool
    native: bool
    shares: Sequence[float] | None
    bucket_bytes: int | None
    anchor_device: torch.device | str | None
    verify: int | None


def check_settings(settings: Mapping[str, Any], what: str, owner: Callable[..., Any]) -> None:
    """Raises TypeError or ValueError for settings that an owner does not have, and for values that they do not take."""
    if unknown := sorted(set(settings) - set(Settings.__annotations__)):
        own = [p.name for p in inspect.signature(owner).parameters.values() if p.kind is p.KEYWORD_ONLY]
        known = ", ".join([*own, *Settings.__annotations__])
        raise TypeError(f"{what} has no setting {', '.join(unknown)}; it takes {known}")
    if wrong := [
        name for name in ("weighted", "native", "broadcast") if not isinstance(settings.get(name, True), bool)
    ]:
        raise TypeError(f"{', '.join(f'{name} is {settings[name]!r}' for name in wrong)}, expected True or False")
    if (policy := settings.get("inner_state", "keep")) not in ("keep", "average", "reset"):
        raise ValueError(f"inner_state is {policy!r}, expected one of ('keep', 'average', 'reset')")
    if settings.get("shares") is not None and settings.get("native"):
        raise ValueError("shares are of our own sum, and native=True asks for the transport's: leave one out")
    if (shares := settings.get("shares")) is not None and not isinstance(shares, list | tuple):
        raise TypeError(f"shares is {shares!r}, expected a list of numbers, such as shares_by_rate gives")
    if (nbytes := settings.get("bucket_bytes")) is not None:
        whole("bucket_bytes", nbytes, ", or None")
    if (verify := settings.get("verify")) is not None:
        whole("verify", verify, " of boundaries, or None", least=0)


def number(name: str, value: Any) -> float:
    """Finite number; TypeError or ValueError for anything else."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} is {value!r}, expected a number")
    if not math.isfinite(value):
        raise ValueError(f"{name} is {value}, expected a finite number")
    return float(value)


def positive(name: str, value: Any) -> float:
    """Number above 0."""
    if not number(name, value) > 0:
        raise ValueError(f"{name} is {value}, expected more than 0")
    return float(value)


def below_one(name: str, value: Any) -> float:
    """Number in [0, 1)."""
    if not 0 <= number(name, value) < 1:
        raise ValueError(f"{name} is {value}, expected 0 ≤ {name} < 1")
    return float(value)


def whole(name: str, value: Any, hint: str = "", *, least: int = 1) -> int:
    """Whole number from `least` on."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}, expected a whole number{hint}")
    if value < least:
        raise ValueError(f"{name} is {value}, expected {least} or more")
    return value
