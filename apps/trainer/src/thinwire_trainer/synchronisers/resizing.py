"""States of one number of ranks as those of another: whose they are, how many steps they have, at which rate."""

from __future__ import annotations

from typing import Any

from communicators.replicas.saved_by import KEY, size_key
from torch.optim.lr_scheduler import LambdaLR

from thinwire_trainer.resuming.likeness import require_equal

State = dict[str, Any]


def as_of(found: object, fresh: State, *, rank: int, size: int) -> object:
    """A wrapper's state of this rank of so many, as if it were of that of `fresh`; DamagedError if it is another's."""
    own = found.get(KEY) if isinstance(found, dict) else None
    if not isinstance(found, dict) or not isinstance(own, dict):
        return found
    require_equal(own.get("rank"), rank, "optimizer/rank")
    require_equal(own.get("world_size"), size, "optimizer/world_size")
    now = fresh[KEY]
    theirs, ours = size_key(size, ""), size_key(now["world_size"], "")
    kept = {name: value for name, value in own.items() if not str(name).startswith(theirs)}
    place = {name: value for name, value in now.items() if name.startswith(ours) or name in ("rank", "world_size")}
    return found | {KEY: kept | place}


def schedule_at(step: int, state: State, schedule: LambdaLR) -> State:
    """The state of a rate schedule, moved to this step of `schedule`, which has the same rates over epochs."""
    rates = [base * shape(step) for base, shape in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)]
    count = state["_step_count"] + step - state["last_epoch"]
    return state | {"last_epoch": step, "_step_count": count, "_last_lr": rates}


def at_rates(optimizer: State, rates: list[float]) -> State:
    """The state of an optimizer, at the rates of its groups."""
    groups = [group | {"lr": rate} for group, rate in zip(optimizer["param_groups"], rates, strict=True)]
    return optimizer | {"param_groups": groups}


def by_epochs(count: int, before: int, after: int) -> int:
    """What was counted in `before` steps, as if they were `after`: none stays none, and all stays all."""
    return count * after // max(before, 1)
