"""Eager SGD: rounds of gradients that do not wait for the last rank (Li et al., PPoPP 2020).

Moments are the optimizer's, after the round's sum. At the end of an epoch, and before a checkpoint, all ranks meet:
then they hold the same model, and no gradient is under way. Arrivals are the world's, so two runs have not the same
bits, unless the world is simulated; what a checkpoint holds comes back exactly.
"""

import math
import sys
from collections.abc import Callable, Mapping, Sequence

from communicators import Communicator
from partial_collectives import EagerSGD
from replicas import STATE_KEY as KEY
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from thinwire_trainer.command_line.options import Options
from thinwire_trainer.synchronisers.synchroniser import (
    Rates,
    State,
    Synchroniser,
    at_rates,
    held_up,
    inner_optimizer,
    schedule_at,
)


class Eager(Synchroniser):
    """An `EagerSGD`; a step is given, and rounds are applied, in `exchange`.

    rates: what its scheduler steps.
    wait: holds this rank up, for an experiment, at the beginning of a step.
    """

    optimizer: EagerSGD
    by_rounds = True

    def __init__(self, model: nn.Module, optimizer: EagerSGD, rates: LambdaLR, wait: Callable[[int], None]) -> None:
        super().__init__(model)
        self.optimizer, self.rates, self.steps, self._wait = optimizer, rates, 0, wait
        self._met, self._finished = True, False

    def zero_grad(self) -> None:
        """Clear the gradients."""
        self._wait(self.steps)
        super().zero_grad()

    def clip_limit(self, clip_norm: float) -> float:
        """Limit of the gradient's norm, clip_norm · √P: as in a synchronous mean, since rounds are divided by P."""
        return clip_norm * math.sqrt(self.optimizer.comm.size)

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
        """End what is under way."""
        self.optimizer.finish()
        self._met = self._finished = True

    def close(self) -> None:
        """Let go of threads and communicators. After an error the others are told."""
        error = sys.exception()
        if error is None and self._finished:
            self.optimizer.close()
        else:
            error = error or RuntimeError("its run ended early")
            self.optimizer.__exit__(type(error), error, None)

    def counters(self) -> Mapping[str, int | float]:
        """Counts for the metrics. Of lateness what is known since the run was started or resumed."""
        rank, share, seconds = self.optimizer.lateness.slowest()
        late = {"last_rank": rank, "last_share": share, "late_seconds": seconds}
        return {"rounds": self.optimizer.applied, **late}

    def remark(self, steps: int) -> str:
        """Line for the user at the end."""
        return f"{self.optimizer.applied} rounds in {steps} steps; {self.optimizer.lateness.summary()}"

    def state_dict(self) -> State:
        """State of the optimizer and its rate. A meeting of all ranks, unless they have just met."""
        self.settle()
        return {"optimizer": self.optimizer.state_dict(), "eager_steps": self.steps}

    def load_state_dict(self, state: State) -> None:
        """Load a state."""
        own = state["optimizer"][KEY]
        settings = own["settings"] | {"scheduler": type(self.rates).__name__}  # of another class in runs before 0.1.0
        self.optimizer.load_state_dict(state["optimizer"] | {KEY: own | {"settings": settings}})
        self.steps = state["eager_steps"]

    def resized(self, states: Sequence[State], *, before: int, after: int, drop: bool) -> State:
        """Rank 0's state for all: they had met, so no gradient is under way, nor to be dropped.

        Rounds are counted on; who has missed some is forgotten.
        """
        del before, drop
        first, now = states[0]["optimizer"], self.state_dict()["optimizer"][KEY]
        own, rounds = first[KEY], now["rounds"]
        schedule = schedule_at(after, own["scheduler"], self.rates)
        machine = rounds["machine"] | {"round": own["rounds"]["machine"]["round"]}
        kept = {name: own[name] for name in ("wrapped", "applied") if name in own}
        counted = {"gradients": after * now["world_size"], "rounds": rounds | {"machine": machine}}
        optimizer = at_rates(first, schedule["_last_lr"]) | {KEY: now | kept | counted | {"scheduler": schedule}}
        return {"optimizer": optimizer, "eager_steps": after}


def eager(options: Options, model: nn.Module, comm: Communicator, rates: Rates) -> Eager:
    """The quorum is the algorithm's name, or --quorum."""
    inner = inner_optimizer(options, model)
    asked = options.own.get("quorum", options.algorithm.removeprefix("eager-"))
    grace = options.own["grace"]
    schedule = rates(inner)
    optimizer = EagerSGD(
        inner,
        model.named_parameters(),
        comm=comm,
        quorum=-(-comm.size // 2) if asked == "auto" else asked,
        max_staleness=options.own["max_staleness"],
        scheduler=schedule,
        grace=grace if grace.endswith("x") else float(grace),
        seed=options.seed,
        verify=options.own["verify"],
    )
    return Eager(model, optimizer, schedule, held_up(options, comm))
