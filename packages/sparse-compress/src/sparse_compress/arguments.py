"""Checks of callers' arguments at the public edge: what was given, and what was expected."""

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from inspect import signature
from math import isfinite
from numbers import Real
from typing import Any

import torch
from torch import Tensor

MAX_NUMEL = 2**31 - 1
"""Most elements of a vector: the limit of an int32 index, and of an int32 count of entries."""
WIRE_DTYPES = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
}
"""Dtypes of gradients, and those in which they travel and are accumulated."""
Bounds = Sequence[tuple[int, int]]
"""[low, high) of every block of the index range, in order and without gaps."""


def integer(value: Any, what: str, *, least: int | None = 0, expected: str) -> int:
    """``value`` as an int of at least ``least``; TypeError for floats, bools and others, ValueError for less.

    ``what`` names it in the message, ``expected`` describes its meaning.
    """
    range_ = "" if least is None else f", {least} or more"
    whole: Any = None if isinstance(value, bool) else value
    try:
        number = operator.index(whole)
    except TypeError:
        given = f"{value!r} ({type(value).__name__})"
        raise TypeError(f"{what} is {given}, expected an integer: {expected}{range_}") from None
    if least is not None and number < least:
        raise ValueError(f"{what} is {number}, expected {expected}{range_}")
    return number


def element_count(numel: Any) -> int:
    """``numel`` as an int; TypeError for anything but an integer, ValueError beyond 0 … 2³¹ − 1."""
    count = integer(numel, "numel", expected="the number of elements")
    if count > MAX_NUMEL:
        raise ValueError(f"numel is {count}, expected 0 … {MAX_NUMEL} (int32 indices): split the vector")
    return count


def number(value: Any, what: str, expected: str, fits: Callable[[Any], bool]) -> float:
    """``value`` as a float; TypeError for what is no real number, ValueError for one that does not fit.

    ``what`` names it in the message, ``expected`` describes its meaning and range.
    """
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{what} is {value!r} ({type(value).__name__}), expected {expected}")
    if not fits(value):
        raise ValueError(f"{what} is {value}, expected {expected}")
    return float(value)


def share_of(value: Any, what: str, *, expected: str) -> float:
    """``value`` as a float of (0, 1]; errors as `number`'s."""
    return number(value, what, f"{expected}, 0 < {what} ≤ 1", lambda share: 0 < share <= 1)


def positive(value: Any, what: str, *, expected: str) -> float:
    """``value`` as a finite float above 0; errors as `number`'s."""
    return number(value, what, f"{expected}, {what} > 0, and finite", lambda given: given > 0 and isfinite(given))


def check_compressor(compressor: Any) -> None:
    """Raises TypeError for what is no compressor, such as the class in place of one, or has half a state protocol."""
    if isinstance(compressor, type):
        name = compressor.__name__
        raise TypeError(f"compressor is the class {name}, expected one of it, as {name}()")
    if not callable(compressor) or not hasattr(compressor, "entries"):
        raise TypeError(f"compressor is {compressor!r}, expected one such as TopK(0.01), with entries(numel)")
    if hasattr(compressor, "state_dict") != hasattr(compressor, "load_state_dict"):
        raise TypeError(f"{compressor} has only one of state_dict and load_state_dict, expected both or neither")
    takes = signature(compressor).parameters.values() if hasattr(compressor, "state_dict") else ()
    if takes and not any(one.name == "name" or one.kind is one.VAR_KEYWORD for one in takes):
        raise TypeError(f"{compressor} keeps a state by name, so its call must take one: __call__(tensor, *, name='')")


def check_keys(state: Mapping[str, Any], keys: Collection[str]) -> None:
    """Raises ValueError for a saved state with other keys."""
    if set(state) != set(keys):
        raise ValueError(f"the state has the keys {sorted(map(str, state))}, expected {sorted(keys)}: it is another's")


def check_blocks(bounds: Bounds, budgets: Sequence[int], numel: int, *, gaps: bool = False) -> None:
    """Raises ValueError unless blocks make up ``numel`` elements, in order, each with a budget; or some of them."""
    ends = [0, *(high for _, high in bounds)]
    fits = len(bounds) == len(budgets) and all(
        (end <= low if gaps else end == low) and 0 <= budget <= high - low
        for end, (low, high), budget in zip(ends, bounds, budgets, strict=False)
    )
    if not fits or (ends[-1] > numel if gaps else ends[-1] != numel):
        raise ValueError(
            f"blocks {list(bounds)} with the budgets {list(budgets)}, expected [low, high) in order"
            f"{'' if gaps else ' and without gaps'} of {numel} elements, and for each a budget of 0 … its length"
        )


def check_bytes(buffer: Any) -> None:
    """Raises TypeError for anything but a contiguous 1-D uint8 tensor."""
    if getattr(buffer, "dtype", None) != torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous():
        given = f"{buffer.dtype}, {tuple(buffer.shape)}" if isinstance(buffer, Tensor) else type(buffer).__name__
        raise TypeError(f"expected a contiguous 1-D uint8 tensor, got {given}")


def flatten(tensor: Tensor) -> Tensor:
    """``tensor`` without its graph as a 1-D view, row by row; copied only where no such view exists.

    Raises the errors of ``check_dense``.
    """
    check_dense(tensor, "tensor")
    return tensor.detach().resolve_neg().reshape(-1)


def check_dense(tensor: Tensor, what: str) -> None:
    """Refuses anything but a dense tensor of floats; ``what`` names the culprit in the message.

    Raises:
        TypeError: No tensor, a nested one, a sparse layout, or another dtype than float16, bfloat16, float32 and
            float64.
        ValueError: More than 2³¹ − 1 elements.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{what} is {type(tensor).__name__}, expected a tensor: use torch.as_tensor(…)")
    if tensor.is_nested:
        raise TypeError(f"{what} is a nested tensor, expected a plain one: give its parts")
    if tensor.layout != torch.strided:
        raise TypeError(f"{what} has layout {tensor.layout}, expected a dense one: use .to_dense()")
    if tensor.dtype not in WIRE_DTYPES:
        raise TypeError(f"{what} is {tensor.dtype}, expected one of {list(WIRE_DTYPES)}")
    if tensor.numel() > MAX_NUMEL:
        raise ValueError(
            f"{what} has {tensor.numel()} elements, at most {MAX_NUMEL} fit int32 indices: compress it in parts"
        )
