"""Default process group that a state found, and whether it is still the one that trains."""

from __future__ import annotations

from typing import Any

from replicas import default_group


def refuse_other_world(found: Any, what: str) -> None:
    """Raises RuntimeError where the default process group is another one than `found`, which `what` looked up."""
    now = default_group()
    if now is not found:
        before = "no process group" if found is None else "another process group"
        raise RuntimeError(
            f"{what} found {before} as the default, and there is one of {now.size() if now else 0} ranks now: "
            "its means would be over the wrong ranks; make it anew after init_process_group()"
        )
