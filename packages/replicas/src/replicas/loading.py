"""Loading a state as a whole: one that does not fit is a ValueError, and leaves everything as it was.

A state comes from a file that anybody may have made. Classes that load one check what they know of; `check_like`
refuses values of other kinds than their own, and `wholly` is for what nobody has thought of.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from replicas.states import check_is_state

OURS = ("replicas.", "data_parallel.", "local_sgd.", "partial_collectives.", "sparse_compress.")
COUNTS = range(1 << 62)
"""Whole numbers that a state may count: the sum of two still fits 64 bits."""
WORDS = range(-(1 << 63), 1 << 63)
MALFORMED = (
    *(TypeError, LookupError, AttributeError, ArithmeticError, ValueError),
    *(NotImplementedError, RecursionError),
)
"""Errors of malformed states, beside RuntimeError itself; others, as of memory or files, stay as they are."""


@contextmanager
def wholly(holder: Any, what: str, state: Any) -> Iterator[None]:
    """Context in which an object loads a state: wholly, or by an error not at all.

        def load_state_dict(self, state):
            with wholly(self, "a MeanOptimizer", state):
                check_like(state, {"steps": 0, "mean": self.mean}, "")
                load_into(self.optimizer, state["wrapped"])
                self.steps, mean = state["steps"], state["mean"]
                self.mean.copy_(mean)  # last

    Attributes of the object, and of all of ours and all with `load_state_dict` that hang on it, are put back after an
    error, but for modules, and for classes with `loads_wholly = True`, which other threads change and which do so by
    themselves; tensors that are written in place must be written last.

    Args:
        holder: Object that loads.
        what: Name of it, for errors.
        state: State that is loaded.

    Raises:
        TypeError: It is no state at all.
        ValueError: In place of whatever a malformed state brings about.
    """
    check_is_state(state)
    before: dict[int, tuple[Any, Any]] = {}
    before[id(holder)] = holder, dict(vars(holder))
    for held in vars(holder).values():
        _note(held, before)
    try:
        yield
    except Exception as error:
        for held, content in before.values():
            _put_back(held, content)
        if type(error) is ValueError or not (isinstance(error, MALFORMED) or type(error) is RuntimeError):
            raise
        said = f"{type(error).__name__}: {error!s:.200}"
        raise ValueError(f"the state cannot be loaded into {what} ({said}): it was damaged or cut") from error


def _note(held: Any, before: dict[int, tuple[Any, Any]]) -> None:
    """Notes, by identity, the content of an object and of all that hangs on it."""
    if id(held) in before or isinstance(held, Enum) or getattr(type(held), "loads_wholly", False):
        return
    if isinstance(held, dict | list):
        before[id(held)] = held, held.copy()
        parts: Iterable[Any] = held.values() if isinstance(held, dict) else held
    elif isinstance(held, tuple):
        parts = held
    elif hasattr(held, "__dict__") and (type(held).__module__.startswith(OURS) or _loads(held)):
        before[id(held)] = held, dict(vars(held))
        parts = vars(held).values()
    else:
        return
    for part in parts:
        _note(part, before)


def _loads(held: Any) -> bool:
    """Whether it has state of its own to load, as an optimizer, a scheduler or a user's compressor; no module."""
    return hasattr(type(held), "load_state_dict") and not isinstance(held, nn.Module)


def _put_back(held: Any, content: Any) -> None:
    if isinstance(held, list):
        held[:] = content
    elif isinstance(held, dict):
        held.clear()
        held.update(content)
    else:  # never without an attribute, which another thread may look at
        vars(held).update(content)
        for added in vars(held).keys() - content.keys():
            delattr(held, added)


def check_like(given: Any, like: Any, where: str) -> None:
    """Checks that each value is of the same kind as in a state of this object's own.

    Whole numbers count from 0 where the own one does; a tensor has the own one's shape, a list any length. What only
    the given state has is not looked at.

    Args:
        given: State.
        like: Own state, of plain values and tensors.
        where: Name of the place, for errors.

    Raises:
        ValueError: One is not, or is missing.
    """
    if isinstance(like, Mapping):
        if not isinstance(given, Mapping):
            raise _unlike(where, given, "a dict")
        if lacking := [key for key in like if key not in given]:
            raise ValueError(f"{where} lacks {lacking}: it was damaged or cut")
        for key, value in like.items():
            check_like(given[key], value, f"{where}, {key}" if where else str(key))
    elif isinstance(like, list | tuple):
        if not isinstance(given, list | tuple):
            raise _unlike(where, given, "a list")
        for one in given if like else ():
            check_like(one, like[0], f"an entry of {where}")
    elif isinstance(like, Tensor):
        _check_tensor(given, like, where)
    elif like is None:
        if isinstance(given, str | bytes | Mapping):
            raise _unlike(where, given, "None or a number")
    elif isinstance(like, bool) or isinstance(given, bool):
        if type(given) is not type(like):
            raise _unlike(where, given, f"a {type(like).__name__}")
    elif isinstance(like, int):
        if not isinstance(given, int) or given not in (COUNTS if like >= 0 else WORDS):
            raise _unlike(where, given, "a whole number")
    elif isinstance(like, float):
        if not is_number(given) or (given != given and like == like):
            raise _unlike(where, given, "a number")
    elif isinstance(like, str) and not isinstance(given, str):
        raise _unlike(where, given, "a text")


def is_number(given: Any) -> bool:
    """Whether it is a float, or a whole number of 64 bits.

    Args:
        given: Anything.
    """
    return isinstance(given, float) or (isinstance(given, int) and not isinstance(given, bool) and given in WORDS)


def _check_tensor(given: Any, like: Tensor, where: str) -> None:
    """Refuses, by a ValueError, all but a dense tensor of the same shape, floating-point where the own one is."""
    if not is_dense(given):
        raise _unlike(where, given, "a dense tensor")
    if given.shape != like.shape or given.is_floating_point() != like.is_floating_point():
        expected = f"a tensor of {like.dtype} of shape {tuple(like.shape)}"
        raise _unlike(where, f"one of {given.dtype} of shape {tuple(given.shape)}", expected)


def is_dense(given: Any) -> bool:
    """Whether it is a tensor with memory for every element.

        if not all(map(is_dense, state["residuals"].values())):
            raise ValueError("the residuals were damaged")

    Args:
        given: Anything.
    """
    if not isinstance(given, Tensor) or given.layout != torch.strided or given.is_meta or given.is_complex():
        return False
    steps = zip(given.shape, given.stride(), strict=True)
    reached = given.storage_offset() + sum((count - 1) * step for count, step in steps) + 1
    return not given.numel() or given.untyped_storage().nbytes() >= reached * given.element_size()


def _unlike(where: str, given: Any, expected: str) -> ValueError:
    return ValueError(f"{where} of the state is {given!r:.100}, expected {expected}: it was damaged")
