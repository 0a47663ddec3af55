"""Settings that shape an update besides the gradient: rates, momenta, the schedule. Alike on all ranks in a round."""

from typing import Any

from torch import Tensor
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

_PLAIN = (bool, int, float, str, type(None), tuple, list)


def settings_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Settings of all parameter groups, as plain values; "initial_lr" is a scheduler's."""
    return [
        {
            name: value.tolist() if isinstance(value, Tensor) else value
            for name, value in group.items()
            if name not in ("params", "param_names", "initial_lr")
        }
        for group in optimizer.param_groups
    ]


def as_facts(optimizer: Optimizer, scheduler: Any) -> str:
    """Settings that ranks must share at the beginning, as facts."""
    groups = [
        {name: value for name, value in group.items() if isinstance(value, _PLAIN)} for group in settings_of(optimizer)
    ]
    return f"{type(optimizer).__name__}{groups}, scheduler={scheduler and type(scheduler).__name__}"


def check_verify(verify: Any) -> None:
    """Raises TypeError or ValueError for what is no number of meetings."""
    if verify is not None and (isinstance(verify, bool) or not isinstance(verify, int)):
        raise TypeError(f"verify is {verify!r}, expected a whole number of meetings, or None")
    if verify is not None and verify < 0:
        raise ValueError(f"verify is {verify}, expected 0 or more meetings, or None")


def changes(optimizer: Optimizer, known: list[dict[str, Any]]) -> str:
    """Settings that are no longer as they were known, as text; "" for none."""
    return ", ".join(
        f"{name} {before.get(name)} -> {now[name]} in parameter group {number}"
        for number, (now, before) in enumerate(zip(settings_of(optimizer), known, strict=True))
        for name in now
        if isinstance(now[name], _PLAIN) and now[name] != before.get(name)
    )


def refuse_changed(optimizer: Optimizer, known: list[dict[str, Any]]) -> None:
    """Raises ValueError for settings that changed since the last round: a rank does not know the others'."""
    if changed := changes(optimizer, known):
        raise ValueError(
            f"settings changed between two rounds: {changed}; ranks do not take as many rounds in a step, so their "
            "models would part: give scheduler=, which goes by the gradients of all ranks, or change them on all ranks "
            "right after synchronize()"
        )


def check_steps(optimizer: Optimizer, scheduler: Any) -> None:
    """Raises TypeError or ValueError for an optimizer, or a scheduler, that cannot be stepped once a round."""
    if isinstance(optimizer, LBFGS):
        raise TypeError("LBFGS asks for gradients several times in a step, for which EagerSGD takes one: wrap another")
    if isinstance(scheduler, ReduceLROnPlateau):
        raise TypeError(
            "a ReduceLROnPlateau takes a metric: leave it out, and step it yourself after synchronize(), with a metric "
            "that is the same on all ranks: average it, and share the buffers (buffers='average')"
        )
    if scheduler is not None and (isinstance(scheduler, type) or not callable(getattr(scheduler, "step", None))):
        raise TypeError(f"scheduler is {scheduler!r}, expected a scheduler of the wrapped optimizer, or None")
    if scheduler is not None and getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise ValueError("the scheduler is of another optimizer, expected one of the wrapped optimizer")
