"""Settings of a class of one's own, which ranks compare: the fields of its dataclass, and nothing else."""

from inspect import get_annotations


def check_settings(kind: type, base: type, *, dataclass: str = "@dataclass(frozen=True)") -> None:
    """Raises TypeError for settings that are no fields, so that ranks could not compare them, nor options set them.

    kind: a subclass of `base`. dataclass: the decorator that such classes have.
    """
    for one in kind.__mro__[: kind.__mro__.index(base)]:
        if "__dataclass_fields__" in vars(one):
            continue
        bare = [
            name
            for name, declared in get_annotations(one).items()
            if not (hasattr(base, name) or name.startswith("_") or "ClassVar" in str(declared))
        ]
        if bare or "__init__" in vars(one):
            fault = f"declares {', '.join(bare)} as no field" if bare else "has an __init__ of its own"
            raise TypeError(
                f"{one.__name__} {fault}, so ranks could not compare its settings: put {dataclass} above it, "
                "and make them its fields, without an __init__"
            )
