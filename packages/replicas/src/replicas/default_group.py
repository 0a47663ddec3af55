"""Default process group that a state found, and whether it is still the one that trains."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def default_group() -> Any:
    """The default process group, None while there is none."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def refuse_other_world(found: Any, what: str) -> None:
    """Raises RuntimeError where the default process group is another one than `found`, which `what` looked up."""
    now = default_group()
    if now is not found:
        before = "no process group" if found is None else "another process group"
        raise RuntimeError(
            f"{what} found {before} as the default, and there is one of {now.size() if now else 0} ranks now: "
            "its means would be over the wrong ranks; make it anew after init_process_group()"
        )


def refuse_alone(what: str) -> None:
    """Raises RuntimeError where there is a default process group of several ranks, for one that found a single rank."""
    group = default_group()
    if group is not None and group.size() > 1:
        raise RuntimeError(
            f"{what} was made before init_process_group(), found one rank, and would train alone, but there are "
            f"{group.size()} ranks now: make it after init_process_group(), or give it comm"
        )
