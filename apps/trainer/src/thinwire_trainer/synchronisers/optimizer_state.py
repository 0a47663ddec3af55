"""States of torch's optimizers and rate schedules: completed across versions of torch, compared with a new one's."""

from collections.abc import Mapping, Sequence, Set
from typing import Any

from communicators.replicas.saved_by import KEY

from thinwire_trainer.errors import DamagedError
from thinwire_trainer.resuming.likeness import require_equal, require_like

State = dict[str, Any]


def completed_optimizer(found: object, fresh: State) -> object:
    """With the settings that this version of torch knows, and no others."""
    if not isinstance(found, dict) or not isinstance(groups := found.get("param_groups"), list):
        return found
    for number, (group, own) in enumerate(zip(groups, fresh["param_groups"], strict=False)):
        if isinstance(group, dict):
            groups = [*groups[:number], _known(group, own, {"lr", "params"}), *groups[number + 1 :]]
    return found | {"param_groups": groups}


def completed_counts(found: object, fresh: Sequence[tuple[str, State]], *, names: Set[str]) -> list[tuple[str, State]]:
    """A new compressor's state, as it would be once it had been called for the buckets that `found` names.

    found: an optimizer's state. names: of parameters, which buckets have, too.
    """
    own = found.get(KEY) if isinstance(found, dict) else None
    parts = own.get("compressor") if isinstance(own, dict) else None
    parts = parts if isinstance(parts, list) and len(parts) == len(fresh) else [None] * len(fresh)
    called = [dict(part) if isinstance(part, Mapping) else {} for part in map(_second, parts)]
    return [(name, dict.fromkeys(names & part.keys(), 0)) for (name, _), part in zip(fresh, called, strict=True)]


def _second(part: object) -> object:
    return part[1] if isinstance(part, list | tuple) and len(part) == 2 else None


def completed_schedule(found: object, fresh: State) -> object:
    """With what this version of torch keeps of a schedule, and nothing else."""
    needed = {"last_epoch", "base_lrs", "_last_lr", "_step_count"}
    return _known(found, fresh, needed) if isinstance(found, dict) else found


def require_schedule(found: object, fresh: State, name: str, *, step: int) -> None:
    """DamagedError unless it is a schedule's state after so many steps, from the same rates on."""
    require_like(found, fresh, name)
    assert isinstance(found, Mapping)
    require_equal(found["last_epoch"], step, f"{name}/last_epoch")
    require_equal(found["base_lrs"], fresh["base_lrs"], f"{name}/base_lrs")


def require_groups(found: State, fresh: State, name: str) -> None:
    """DamagedError unless all settings of a wrapped optimizer, but for the rate, are those of the new one."""
    for number, (group, own) in enumerate(zip(found["param_groups"], fresh["param_groups"], strict=True)):
        for setting in own.keys() - {"lr"}:
            require_equal(group[setting], own[setting], f"{name}/param_groups/{number}/{setting}")


def require_at_most(found: int, most: int, name: str) -> None:
    """DamagedError for a count that is larger than it can be."""
    if found > most:
        raise DamagedError(f"{name} is {found}, expected at most {most}")


def _known(found: State, fresh: State, needed: Set[str]) -> State:
    if not needed <= found.keys():
        return found
    return {name: found.get(name, value) for name, value in fresh.items()}
