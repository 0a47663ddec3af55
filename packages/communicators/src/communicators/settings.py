"""Settings of a class of one's own, which ranks compare: the fields of its dataclass, and nothing else."""

import re
import zlib
from inspect import get_annotations, getattr_static, signature
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy as np
import torch

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def check_settings(kind: type, base: type, *, dataclass: str = "@dataclass(frozen=True)") -> None:
    """Refuses settings that are no fields of a dataclass, so that ranks could not compare them, nor options set them.

    Args:
        kind: A subclass of `base`.
        base: The class of the family, whose own names are no settings.
        dataclass: The decorator that such classes have.

    Raises:
        TypeError: There are some: an annotated name without the decorator, or an `__init__` of one's own.
    """
    known, effective = getattr(kind, "__dataclass_fields__", {}), getattr_static(kind, "__init__")
    for one in kind.__mro__[: kind.__mro__.index(base)]:
        bare = [
            name
            for name, declared in get_annotations(one).items()
            if not (name in known or hasattr(base, name) or name.startswith("_") or "ClassVar" in str(declared))
        ]
        init, decorated = vars(one).get("__init__"), "__dataclass_fields__" in vars(one)
        own = init is effective and not (decorated and {*signature(init).parameters} <= {*known, "self"})
        if bare or own:
            fault = f"declares {', '.join(bare)} as no field" if bare else "has an __init__ of its own"
            raise TypeError(
                f"{one.__name__} {fault}, so ranks could not compare its settings: put {dataclass} above it, "
                "and make them its fields, without an __init__"
            )


def comparable(value: Any) -> Any:
    """A setting as what ranks can compare as text: a tensor or an array by a hash of its bits, a function by its name.

    Lists, tuples and dicts hold such; an address in memory, which differs from rank to rank, is left out of the text of
    anything else. So two lambdas of one module are the same.

    Args:
        value: The setting; a number or a text, and whatever else has a text without an address, is returned as it is.
    """
    if type(value) in (list, tuple):
        return type(value)(map(comparable, value))
    if type(value) is dict:
        return {key: comparable(one) for key, one in value.items()}
    if isinstance(value, FunctionType | BuiltinFunctionType):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        return _hashed(value)
    if not isinstance(value, str) and _ADDRESS.search(repr(value)):
        return _ADDRESS.sub("", str(value))
    return value


def _hashed(value: Any) -> Any:
    """A number, or type, shape and a hash of the bits; what has no bits in memory as it is."""
    if value.ndim == 0:
        return value.item() if hasattr(value, "item") else value
    try:
        x = value if isinstance(value, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(value))
        bits = x.detach().cpu().resolve_conj().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    except (RuntimeError, TypeError, NotImplementedError):  # sparse, meta; text, objects
        return value
    return f"{x.dtype} of {tuple(x.shape)} #{zlib.crc32(bits):08x}"
