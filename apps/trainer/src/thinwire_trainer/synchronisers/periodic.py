"""Periodic averaging: every rank takes steps of its own, and now and then all exchange a mean of their models.

Moments are the optimizer's, each rank's own. The rate goes by steps.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

from communicators import Communicator
from local_sgd import ALGORITHMS, PeriodicAveraging
from replicas import STATE_KEY as KEY
from torch import nn
from torch.optim import SGD

from thinwire_trainer.command_line.options import Options
from thinwire_trainer.errors import AgreedError, RunError
from thinwire_trainer.synchronisers.synchroniser import (
    Rates,
    State,
    Synchroniser,
    at_rates,
    inner_optimizer,
    schedule_at,
)

UNDRAINED = (
    "between averages every rank has a model of its own, so periodic averaging goes on with another number of ranks "
    "only from the end of a run, where it drains: end it with --nworkers {size} first (with --lr-schedule constant or "
    "--milestones, --max-epochs may be an earlier end)"
)

MAKERS: dict[str, Callable[..., PeriodicAveraging]] = dict(ALGORITHMS)


class Periodic(Synchroniser):
    """An optimizer of local_sgd, and the rate by its steps."""

    optimizer: PeriodicAveraging

    def __init__(self, model: nn.Module, optimizer: PeriodicAveraging, rates: Rates) -> None:
        super().__init__(model)
        self.optimizer, self.schedule = optimizer, rates(optimizer)

    def update(self) -> None:
        """Step the optimizer and its rate."""
        self.optimizer.step()
        self.schedule.step()

    def average(self) -> None:
        """Average the models."""
        self.optimizer.average()

    def settle(self) -> None:
        """Wait for what is under way."""
        self.optimizer.wait()

    def finish(self) -> None:
        """End what is under way."""
        self.optimizer.finish()

    def averaged_model(self, comm: Communicator) -> AbstractContextManager[Any]:
        """Context with the averaged model. Buffers are averaged, too."""
        return self.optimizer.averaged_model(comm=comm)

    def counters(self) -> Mapping[str, int | float]:
        """Counts for the metrics: a measured one, from the first exchange after the run was started or resumed on."""
        hidden = self.optimizer.hidden_fraction
        return {} if hidden is None else {"hidden_fraction": hidden}

    def resized(self, states: Sequence[State], *, before: int, after: int, drop: bool) -> State:
        """State for this number of ranks, from drained states, which hold one model; momenta are one rank's each.

        The momenta of rank r are those of rank r mod P of before. What a compressor has not sent can only be dropped.
        """
        if not all(state["optimizer"][KEY]["drained"] for state in states):
            raise RunError(UNDRAINED.format(size=len(states)))
        now = self.state_dict()["optimizer"][KEY]
        if "residuals" in now and not drop:
            raise RunError(
                "--residuals carry is not for sparseloco, demo and --compress of periodic averaging, whose residuals "
                "are of their own ranks: give --residuals drop"
            )
        chosen = states[now["rank"] % len(states)]
        schedule = schedule_at(after, chosen["schedule"], self.schedule)
        optimizer = at_rates(chosen["optimizer"], schedule["_last_lr"])
        own = optimizer[KEY] | {name: now[name] for name in ("residuals",) if name in now}
        own["block"] = own["block"] | {"steps": after}
        return {"optimizer": optimizer | {KEY: own}, "schedule": schedule}


def periodic(options: Options, model: nn.Module, comm: Communicator, rates: Rates) -> Periodic:
    """Own flags are the keyword arguments of the optimizer, but for those that are left to it: "auto", "none"."""
    sign = options.algorithm == "demo"  # which has the weight decay in the sign's step
    inner = inner_optimizer(replace(options, weight_decay=0.0) if sign else options, model)
    given: dict[str, Any] = {name: value for name, value in options.own.items() if value not in ("auto", "none")}
    if sign:
        given["weight_decay"] = options.weight_decay
    if "outer_rate" in given:
        rate, momentum = given.pop("outer_rate"), given.pop("outer_momentum")
        given["outer"] = partial(SGD, lr=rate, momentum=momentum, nesterov=momentum > 0)
    if "block_momentum" in given:
        given["momentum"] = given.pop("block_momentum")
    given["verify"] = given["verify"] or None  # 0 would leave out the comparison at the first boundary, too
    make = partial(MAKERS[options.algorithm], inner, comm=comm, model=model)
    try:
        return Periodic(model, make(**given), rates)
    except ValueError as error:  # such as EASGD's α, whose range depends on the number of ranks
        raise AgreedError(f"--algorithm {options.algorithm}: {error}") from error
