"""Eager SGD: rounds of gradients that do not wait for the last rank (Li et al., PPoPP 2020).

Moments are the optimizer's, after the round's sum. At the end of an epoch, and before a checkpoint, all ranks meet:
then they hold the same model, and no gradient is under way. Arrivals are the world's, so two runs have not the same
bits, unless the world is simulated; what a checkpoint holds comes back exactly.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence

from communicators import Communicator
from communicators.replicas.saved_by import KEY
from partial_collectives import EagerSGD
from sparse_collectives.training.clipping import clip_limit
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from thinwire_trainer.command_line.options import Options
from thinwire_trainer.resuming.likeness import require_equal, require_like
from thinwire_trainer.synchronisers.inner import inner_optimizer
from thinwire_trainer.synchronisers.optimizer_state import (
    completed_optimizer,
    completed_schedule,
    require_at_most,
    require_groups,
    require_schedule,
)
from thinwire_trainer.synchronisers.resizing import as_of, at_rates, schedule_at
from thinwire_trainer.synchronisers.stragglers import held_up
from thinwire_trainer.synchronisers.synchroniser import Rates, State, Synchroniser


class RateByGradients:
    """A rate schedule that goes by the gradients in all rounds so far, P to a step: alike on all ranks at equal rounds,
    and at its end when all gradients of the run are in, whatever the number of rounds that took.

    gradients: how many, asked after each round.
    """

    def __init__(self, schedule: LambdaLR, gradients: Callable[[], int], size: int) -> None:
        self.schedule, self._gradients, self._size = schedule, gradients, size

    def step(self) -> None:
        """After a round."""
        while self.schedule.last_epoch < self._gradients() // self._size:
            self.schedule.step()

    def state_dict(self) -> State:
        """The schedule's."""
        state: State = self.schedule.state_dict()
        return state

    def load_state_dict(self, state: State) -> None:
        """Goes on with it."""
        self.schedule.load_state_dict(state)


class Eager(Synchroniser):
    """An `EagerSGD`; a step is given, and rounds are applied, in `exchange`.

    rates: what its scheduler steps.
    wait: holds this rank up, for an experiment, at the beginning of a step.
    """

    def __init__(self, model: nn.Module, optimizer: EagerSGD, rates: LambdaLR, wait: Callable[[int], None]) -> None:
        super().__init__(model)
        self.optimizer, self.rates, self.steps, self._wait = optimizer, rates, 0, wait
        self._met, self._finished = True, False

    def zero_grad(self) -> None:
        """See `Synchroniser.zero_grad`."""
        self._wait(self.steps)
        self.optimizer.zero_grad()

    def clip_limit(self, clip_norm: float) -> float:
        """See `Synchroniser.clip_limit`: as in a synchronous mean, since rounds are divided by P."""
        return clip_limit(clip_norm, self.optimizer.comm.size)

    def exchange(self) -> None:
        """Gives this rank's gradient, and applies the rounds that are over, at least one."""
        self._met = False
        self.steps += 1
        self.optimizer.step()

    def update(self) -> None:
        """Nothing is left to do: see `exchange`."""

    def settle(self) -> None:
        """All ranks meet, see `EagerSGD.synchronize`."""
        if not self._met:
            self.optimizer.synchronize()
            self._met = True

    def finish(self) -> None:
        """See `Synchroniser.finish`."""
        self.optimizer.finish()
        self._met = self._finished = True

    def close(self) -> None:
        """See `Synchroniser.close`. After an error the others are told."""
        error = sys.exception()
        if error is None and self._finished:
            self.optimizer.close()
        else:
            error = error or RuntimeError("its run ended early")
            self.optimizer.__exit__(type(error), error, None)

    def counters(self) -> Mapping[str, int | float]:
        """See `Synchroniser.counters`. Of lateness what is known since the run was started or resumed."""
        rank, share, seconds = self.optimizer.lateness.slowest()
        late = {"last_rank": rank, "last_share": share, "late_seconds": seconds}
        return {"rounds": self.optimizer.applied, **late}

    def remark(self, steps: int) -> str:
        """See `Synchroniser.remark`."""
        return f"{self.optimizer.applied} rounds in {steps} steps; {self.optimizer.lateness.summary()}"

    def state_dict(self) -> State:
        """See `Synchroniser.state_dict`. A meeting of all ranks, unless they have just met."""
        self.settle()
        return {"optimizer": self.optimizer.state_dict(), "eager_steps": self.steps}

    def load_state_dict(self, state: State) -> None:
        """See `Synchroniser.load_state_dict`."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps = state["eager_steps"]

    def fitted(self, state: State, *, step: int) -> State:
        """See `Synchroniser.fitted`. Written where all had met: every gradient of every rank is in, nothing waits."""
        fresh = self.state_dict()
        require_equal(state["eager_steps"], step, "eager_steps")
        optimizer = completed_optimizer(state["optimizer"], fresh["optimizer"])
        own = _as_met(fresh["optimizer"]["distributed"])
        if isinstance(optimizer, dict) and isinstance(found := optimizer.get("distributed"), dict):
            schedule = completed_schedule(found.get("scheduler"), own["scheduler"])
            optimizer = optimizer | {"distributed": found | {"scheduler": schedule}}
        require_like(optimizer, fresh["optimizer"] | {"distributed": own}, "optimizer")
        assert isinstance(optimizer, dict)
        found = optimizer["distributed"]
        for name in ("rank", "world_size"):
            require_equal(found[name], own[name], f"optimizer/{name}")
        require_equal(found["gradients"], step * own["world_size"], "optimizer/gradients")
        _require_met(found["rounds"], own)
        require_at_most(found["applied"], found["rounds"]["machine"]["round"], "optimizer/applied")
        require_groups(optimizer, fresh["optimizer"], "optimizer")
        require_schedule(found["scheduler"], own["scheduler"], "optimizer/scheduler", step=step)
        return {"optimizer": optimizer, "eager_steps": step}

    def resized(self, states: Sequence[State], *, before: int, after: int, drop: bool) -> State:
        """See `Synchroniser.resized`. Rank 0's for all: they had met, so no gradient is under way, nor to be dropped.

        Rounds are counted on; who has missed some is forgotten.
        """
        del drop
        fresh, size = self.state_dict(), len(states)
        first, *_ = [
            self.fitted(_as_of(state, fresh, before, rank=rank, size=size), step=before)
            for rank, state in enumerate(states)
        ]
        schedule = schedule_at(after, first["optimizer"][KEY]["scheduler"], self.rates)
        optimizer = at_rates(first["optimizer"], schedule["_last_lr"])
        own = optimizer[KEY] | {"scheduler": schedule, "gradients": after * optimizer[KEY]["world_size"]}
        return self.fitted({"optimizer": optimizer | {KEY: own}, "eager_steps": after}, step=after)


def _as_of(state: State, fresh: State, steps: int, *, rank: int, size: int) -> State:
    """As if its rounds had been those of as many ranks as there are now."""
    optimizer = as_of(state["optimizer"], fresh["optimizer"], rank=rank, size=size)
    own = optimizer.get(KEY) if isinstance(optimizer, dict) else None
    if not isinstance(optimizer, dict) or not isinstance(own, dict):
        return state
    now = fresh["optimizer"][KEY]
    rounds, machine = now["rounds"], now["rounds"]["machine"]
    then = rounds | {"machine": machine | {"missed": [0] * size, "running": [], "unfinished": []}}
    require_like(found := own.get("rounds"), then, "optimizer/rounds")
    assert isinstance(found, dict)
    _require_met(found, {"world_size": size, "rounds": rounds})
    require_equal(own.get("gradients"), steps * size, "optimizer/gradients")
    counted = {"gradients": steps * now["world_size"]}
    counted["rounds"] = rounds | {"machine": machine | {"round": found["machine"]["round"]}}
    return state | {"optimizer": optimizer | {KEY: own | counted}}


def _as_met(own: State) -> State:
    """A new optimizer's part as a template: without who runs, which has an end, and what SGD holds, by name."""
    machine = own["rounds"]["machine"] | {"running": [], "unfinished": []}
    return own | {"wrapped": None, "rounds": own["rounds"] | {"machine": machine}}


def _require_met(rounds: State, own: State) -> None:
    """DamagedError unless nothing waits, and all ranks run, or have ended."""
    machine, deposits = rounds["machine"], rounds["deposits"]
    require_equal(machine["seed"], own["rounds"]["machine"]["seed"], "optimizer/rounds/seed")
    require_equal(machine["holds"], False, "optimizer/rounds/holds")
    require_equal(deposits["count"], 0, "optimizer/rounds/deposits")
    require_equal(rounds["results"], [], "optimizer/rounds/results")
    everyone = list(range(own["world_size"]))
    for name in ("running", "unfinished"):
        require_equal(machine[name], everyone if machine[name] else [], f"optimizer/rounds/{name}")


def eager(options: Options, model: nn.Module, comm: Communicator, rates: Rates) -> Eager:
    """The quorum is the algorithm's name, or --quorum."""
    inner = inner_optimizer(options, model)
    asked = options.own.get("quorum", options.algorithm.removeprefix("eager-"))
    grace = options.own["grace"]
    schedule = RateByGradients(rates(inner), lambda: optimizer.gradients, comm.size)
    optimizer = EagerSGD(
        inner,
        model.named_parameters(),
        comm=comm,
        quorum=-(-comm.size // 2) if asked == "auto" else asked,
        max_staleness=options.own["max_staleness"],
        scheduler=schedule,
        grace=grace if grace.endswith("x") else float(grace),
        seed=options.seed,
    )
    return Eager(model, optimizer, schedule.schedule, held_up(options, comm))
