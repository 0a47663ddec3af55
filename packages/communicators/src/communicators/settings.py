"""Settings of a class of one's own, which ranks compare: the fields of its dataclass, and nothing else."""

from inspect import get_annotations, getattr_static, signature


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
