"""Whether a state that was read is one that this run could have written, before anything of it is loaded."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from thinwire_trainer.errors import DamagedError

PLAIN = (int, float, str, type(None))


def require_like(found: object, like: object, name: str) -> None:
    """DamagedError, naming the place, unless `found` has the kinds, keys, shapes and dtypes of `like`.

    Numbers: whole ones are counts, from 0 on. An empty list in `like` stands for any list of plain values, and None
    for such a list or any plain value.
    """
    if isinstance(like, Tensor):
        _require_tensor(found, like, name)
    elif isinstance(like, Mapping):
        _require_mapping(found, like, name)
    elif isinstance(like, list | tuple):
        _require_list(found, list(like), name)
    elif like is None:
        if type(found) not in PLAIN:
            _require_list(found, [], name)
    elif type(like) is float:
        _require(type(found) in (int, float), found, "a number", name)
    elif type(like) is int:
        _require(type(found) is int and 0 <= found < 1 << 63, found, "a whole number from 0 on", name)
    else:
        _require(type(found) is type(like), found, f"a {type(like).__name__}", name)


def require_keys(found: object, like: Mapping[Any, object], name: str) -> None:
    """DamagedError unless `found` is a dict with the keys of `like`."""
    if not isinstance(found, dict):
        raise DamagedError(f"{name} is a {type(found).__name__}, expected a dict")
    wrong = sorted(map(str, found.keys() ^ like.keys()))
    if wrong:
        raise DamagedError(f"{name}: only the file, or only this run, has {', '.join(wrong[:5]):.200}")


def require_equal(found: object, expected: object, name: str) -> None:
    """DamagedError unless a number or name is the one that this run would have written here."""
    require_like(found, expected, name)
    _require(found == expected, found, repr(expected), name)


def _require_tensor(found: object, like: Tensor, name: str) -> None:
    """An ordinary tensor in memory that nothing else hangs on, such as all that torch.save was given."""
    if type(found) is not Tensor or found.layout != torch.strided or found.device.type != "cpu" or found.requires_grad:
        raise DamagedError(f"{name} is a {type(found).__name__} of another kind, expected a plain tensor")
    if (found.shape, found.dtype) != (like.shape, like.dtype):
        raise DamagedError(
            f"{name} is {tuple(found.shape)} of {found.dtype}, expected {tuple(like.shape)} of {like.dtype}"
        )
    if torch._debug_has_internal_overlap(found) == 1:
        raise DamagedError(f"{name} has elements that share memory")


def _require_mapping(found: object, like: Mapping[object, object], name: str) -> None:
    require_keys(found, like, name)
    assert isinstance(found, dict)
    for key in like:
        require_like(found[key], like[key], f"{name}/{key}")


def _require_list(found: object, like: list[object], name: str) -> None:
    if not isinstance(found, list | tuple):
        raise DamagedError(f"{name} is a {type(found).__name__}, expected a list")
    if like and len(found) != len(like):
        raise DamagedError(f"{name} has {len(found)} entries, expected {len(like)}")
    for number, part in enumerate(found):
        if like:
            require_like(part, like[number], f"{name}/{number}")
        else:
            _require(type(part) in PLAIN, part, "a plain value", f"{name}/{number}")


def _require(holds: bool, found: object, expected: str, name: str) -> None:
    if not holds:
        raise DamagedError(f"{name} is {_shown(found):.60}, expected {expected:.60}")


def _shown(found: object) -> str:
    if type(found) is int and found.bit_length() > 64:
        return "a huge number"
    return repr(found) if type(found) in PLAIN else f"a {type(found).__name__}"
