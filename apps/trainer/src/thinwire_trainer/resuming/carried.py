"""What a task carries (`thinwire_trainer.app.Carries`) is read back before it is written, by the rules of a resume.

It costs less than writing the same bytes to the disk; without it a state that can never be loaded would show only then.
"""

from io import BytesIO
from typing import Any

import torch

from thinwire_trainer.errors import DamagedError, RunError
from thinwire_trainer.resuming.likeness import require_like


def template_of(state: object) -> dict[str, Any]:
    """What later states are to be like, on the CPU; RunError where not even this one could be loaded again."""
    read = _read_back(state)
    require_loadable(state, read)
    return read


def require_loadable(state: object, template: dict[str, Any]) -> None:
    """RunError unless a resume could load what `state_dict` has returned."""
    read = _read_back(state)
    if read.keys() != template.keys():
        wrong = ", ".join(sorted(map(str, read.keys() ^ template.keys())))
        raise RunError(_said(f"its keys and those of a new task's state differ by {wrong:.100}"))
    try:
        require_like(read, template, "state_dict()")
    except DamagedError as error:
        raise RunError(_said(str(error))) from None


def _read_back(state: object) -> dict[str, Any]:
    if not isinstance(state, dict):
        raise RunError(_said(f"state_dict() is a {type(state).__name__}, expected a dict"))
    try:
        return {name: _as_loaded(value, name) for name, value in state.items()}
    except RecursionError:
        raise RunError(_said("it contains itself")) from None


def _as_loaded(value: object, name: object) -> object:
    file = BytesIO()
    try:
        torch.save({name: value}, file)
        file.seek(0)
        return torch.load(file, map_location="cpu", weights_only=True)[name]
    except RecursionError:
        raise
    except Exception:  # whatever pickling, or torch, says of the app's own objects
        expected = "expected tensors, numbers, texts, and lists and dicts of them"
        raise RunError(_said(f"{name!s:.40} is, or has, a {_strange(value)}, {expected}")) from None


def _strange(value: object) -> str:
    """The type of the first part that is none of these."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    inner = next((part for part in parts if not isinstance(part, torch.Tensor | int | float | str | None)), value)
    return type(inner).__name__ if inner is value else _strange(inner)


def _said(why: str) -> str:
    return f"the task's state cannot be loaded again: {why} (state_dict of thinwire_trainer.app.Carries)"
