"""Checkpoints of periodic averaging, by parameter, so that they outlive another cut into vectors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from local_sgd.driver import Driver
from local_sgd.parts import by_name, copy_by_name, digest, refuse_other_shapes

ANEW = (
    "call drain() before state_dict(), and any rank's state and model may be loaded at any number of ranks; or start "
    "from a plain checkpoint of the model, made inside averaged_model(), with a new optimizer"
)
NEEDS = ("algorithm", "block", "kept", "rates", "parameters", "drained")


def state_of(driver: Driver) -> dict[str, Any]:
    """This rank's own part of a state; what is under way comes first: waiting for it changes residuals."""
    parts, rule, sums = driver.parts, driver.rule, driver.sums
    under_way, groups = driver.state_dict(), range(len(driver.owner.param_groups))
    return {
        "algorithm": driver.what,
        "block": driver.block.state_dict(),
        "kept": {name: by_name(parts, [part[name] for part in parts]) for name in rule.anchors + rule.momenta},
        "remainders": _remainders(driver),
        "rates": [next((part.last_rate for part in parts if part.group == group), 0.0) for group in groups],
        "parameters": digest(driver.owner.trained),
        "drained": driver.drained,
        **under_way,
        **({} if driver.near is None else {"near": driver.near.state_dict()}),
        **({} if sums is None else {"residuals": {"kind": sums.kind, "parts": sums.state_dict()}}),
    }


def check(driver: Driver, own: Mapping[str, Any]) -> None:
    """Checks the own part of a state before anything is changed; raises ValueError."""
    if own["algorithm"] != driver.what:
        raise ValueError(
            f"the state is of {own['algorithm']}, but this is {driver.what}: to go on with another algorithm start "
            "from a plain checkpoint of the model, made inside averaged_model(), or after drain()"
        )
    for name in driver.rule.anchors + driver.rule.momenta:
        refuse_other_shapes(name, own["kept"].get(name, {}), driver.parts)
    if len(own["rates"]) != (groups := len(driver.owner.param_groups)):
        raise ValueError(f"the state has {len(own['rates'])} parameter groups, the optimizer {groups}")
    if ("near" in own) != (driver.near is not None):
        raise ValueError(f"the state is of {1 + ('near' in own)} levels, sync_every of {1 + bool(driver.near)}")
    theirs, kind = own.get("residuals", {}).get("kind"), None if driver.sums is None else driver.sums.kind
    if theirs != kind:
        raise ValueError(f"the state is of compression {theirs}, but compress={driver.compression!r} is {kind}")
    if driver.sums is not None and _is_own(driver, own):
        driver.sums.check(own["residuals"]["parts"])
    driver.check(own)


def load(driver: Driver, own: Mapping[str, Any]) -> None:
    """Restores an own part that `check` accepted."""
    driver.block.load_state_dict(own["block"])
    for part in driver.parts:
        for name in driver.rule.anchors + driver.rule.momenta:
            copy_by_name(own["kept"][name], part, part[name])
        if part.remainder is not None:
            copy_by_name(own["remainders"], part, part.remainder)
        part.last_rate = own["rates"][part.group]
    if driver.sums is not None and _is_own(driver, own):
        driver.sums.load_state_dict(own["residuals"]["parts"])
    if driver.near is not None:
        driver.near.load_state_dict(own["near"])
    driver.load_state_dict(own)
    driver.drained, driver.loaded = own["drained"], True


def refuse_other_parameters(expected: int, trained: Mapping[str, Tensor]) -> None:
    """Raises RuntimeError where the parameters are not those that went with the state."""
    if digest(trained) != expected:
        raise RuntimeError(
            "the parameters are not those that the loaded state was saved with: load this rank's own "
            "model.state_dict(), saved at the same point, after the optimizer was made (which copies rank 0's)"
        )


def _is_own(driver: Driver, own: Mapping[str, Any]) -> bool:
    """Whether the state was saved by this rank, among the same number of ranks."""
    return bool((own["rank"], own["world_size"]) == (driver.comm.rank, driver.comm.size))


def _remainders(driver: Driver) -> dict[str, Tensor]:
    rounded = [part for part in driver.parts if part.remainder is not None]
    return by_name(rounded, [part.remainder for part in rounded if part.remainder is not None])
