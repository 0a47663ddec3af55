"""Settings of a class of one's own, which ranks compare: the fields of its dataclass, and nothing else."""

import re
import zlib
from inspect import get_annotations, getattr_static, signature
from typing import Any

import torch


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

    Args:
        value: The setting; any other value is returned as it is.

    Raises:
        TypeError: Its text holds an address in memory, which differs from rank to rank.
    """
    if hasattr(value, "__array__"):
        x = torch.as_tensor(value).detach().cpu()
        return f"{x.dtype} of {tuple(x.shape)} #{zlib.crc32(x.reshape(-1).view(torch.uint8).numpy().tobytes()):08x}"
    if isinstance(value, list | tuple):
        return [comparable(one) for one in value]
    if name := getattr(value, "__qualname__", None):
        return f"{value.__module__}.{name}"
    if re.search(r" at 0x[0-9a-f]+", text := repr(value)):
        raise TypeError(
            f"a setting is {text}, which ranks could not compare: give its class a __repr__ of its settings"
        )
    return value
