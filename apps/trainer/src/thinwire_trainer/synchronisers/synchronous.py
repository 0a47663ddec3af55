"""Synchronous SGD: every step is taken with a mean of all ranks' gradients, whole, selected or of low rank.

Momentum has one place. Where every element is sent: in SGD, after the exchange. Where few are selected: in the error
feedback, before the selection (the momentum correction of DGC, Lin et al. 2018, with factor masking), because momentum
applied to what survives a selection amplifies the few entries that were sent and learns badly at small densities.

AdamW behind a selection takes few gradients, each of many steps, for noise. So there each rank's own AdamW comes first,
and what it would do is selected from and exchanged (`UpdateOptimizer`, with `ahead()`).
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from communicators import Communicator
from data_parallel import DistributedOptimizer, UpdateOptimizer, reshard_residuals
from replicas import STATE_KEY as KEY
from sparse_collectives import Algorithm
from sparse_compress import Compressor, DGCTopK, GaussianK, RandomK, Threshold, TopK, WarmUp
from torch import nn
from torch.optim import SGD, Optimizer

from thinwire_trainer.command_line.options import Options
from thinwire_trainer.synchronisers.synchroniser import (
    BuffersBefore,
    Rates,
    State,
    Synchroniser,
    adamw,
    at_rates,
    by_epochs,
    held_up,
    inner_optimizer,
    schedule_at,
)

SELECTIONS: dict[str, Callable[[Options], Compressor]] = {
    "topk": lambda options: TopK(options.own["density"]),
    "dgc": lambda options: DGCTopK(options.own["density"]),
    "gaussiank": lambda options: GaussianK(options.own["density"]),
    "randomk": lambda options: RandomK(options.own["density"], seed=options.seed),
    "threshold": lambda options: Threshold(options.own["threshold"], options.own["density"]),
}
"""By --select; where an algorithm prescribes its selection, TopK says how many."""


def density_by_step(own: Mapping[str, Any]) -> WarmUp | None:
    """Warm-up of the density that --density-warmup asks for: so many dense steps, or DGC's stages; None without one."""
    kind, _, steps = own["density_warmup"].rpartition(":")
    if not int(steps):
        return None
    stages = {} if kind else {"stages": (1.0,)}
    return WarmUp(own["density"], int(steps), **stages)


class SynchronousSGD(Synchroniser):
    """A `DistributedOptimizer` or an `UpdateOptimizer`, whose step is the exchange; and the rate by its steps.

    skips: whether a step may be skipped, which then leaves the model's buffers, too, as they were, on every rank.
    wait: holds this rank up, for an experiment, at the beginning of a step.
    """

    optimizer: DistributedOptimizer | UpdateOptimizer

    def __init__(
        self,
        model: nn.Module,
        optimizer: DistributedOptimizer | UpdateOptimizer,
        rates: Rates,
        *,
        skips: bool,
        wait: Callable[[int], None] = lambda step: None,
    ) -> None:
        super().__init__(model)
        self.optimizer, self.schedule, self._wait = optimizer, rates(optimizer), wait
        self._before = BuffersBefore(model) if skips else None

    def zero_grad(self) -> None:
        """Clear the gradients."""
        self._wait(self.schedule.last_epoch)
        super().zero_grad()
        if self._before:
            self._before.keep()

    def clip_limit(self, clip_norm: float) -> None:
        """Limit of the gradient's norm."""

    def gradients(self) -> AbstractContextManager[None]:
        """Context of forward and backward; of updates with what waits of this rank's."""
        return self.optimizer.ahead() if isinstance(self.optimizer, UpdateOptimizer) else nullcontext()

    def exchange(self) -> None:
        """The mean into every gradient; of updates the whole step."""
        if isinstance(self.optimizer, UpdateOptimizer):
            self._step()
        else:
            self.optimizer.synchronize()

    def update(self) -> None:
        """Step the optimizer and its rate."""
        if isinstance(self.optimizer, DistributedOptimizer):
            self._step()
        self.schedule.step()

    def _step(self) -> None:
        skipped = self.optimizer.skipped
        self.optimizer.step()
        if self._before and self.optimizer.skipped > skipped:
            self._before.restore()

    @property
    def selection_seconds(self) -> float:
        """Seconds of selecting."""
        return self.optimizer.selection_seconds

    def counters(self) -> Mapping[str, int | float]:
        """Counts for the metrics."""
        return {"skipped_steps": self.optimizer.skipped} if self._before else {}

    def remark(self, steps: int) -> str:
        """Line for the user at the end."""
        skipped = self.optimizer.skipped
        return f"{skipped} of {steps} steps were skipped: their gradient was not finite" if skipped else ""

    def resized(self, states: Sequence[State], *, before: int, after: int, drop: bool) -> State:
        """State for this number of ranks, and `reshard_residuals` for residuals and velocities.

        What an algorithm learnt about that number of ranks is forgotten.
        """
        now = self.state_dict()["optimizer"][KEY]
        optimizers = [state["optimizer"] for state in states]
        resharded = reshard_residuals(optimizers, now["world_size"], drop=drop)[now["rank"]]
        own = _counted_by_epochs(resharded[KEY], before, after) | {"algorithm_state": now["algorithm_state"]}
        schedule = schedule_at(after, states[0]["schedule"], self.schedule)
        return {"optimizer": at_rates(resharded, schedule["_last_lr"]) | {KEY: own}, "schedule": schedule}


def _counted_by_epochs(own: State, before: int, after: int) -> State:
    """Steps, those that were skipped, and a compressor's calls."""
    counted = own | {"steps": after, "skipped": by_epochs(own["skipped"], before, after)}
    if "compressor" in own:
        counted["compressor"] = [
            (name, {bucket: by_epochs(calls, before, after) for bucket, calls in counts.items()})
            for name, counts in own["compressor"]
        ]
    return counted


def dense(options: Options, model: nn.Module, comm: Communicator, rates: Rates) -> SynchronousSGD:
    """The mean of whole gradients."""
    return _made(options, model, comm, rates, inner_optimizer(options, model), wire=options.own["wire"])


def whole(options: Options, model: nn.Module, comm: Communicator, rates: Rates) -> SynchronousSGD:
    """Something of every element, the rest fed back: powersgd, dense-int8."""
    return _made(options, model, comm, rates, inner_optimizer(options, model), takes=("rank", "dense_steps"))


def sparse(
    options: Options, model: nn.Module, comm: Communicator, rates: Rates, *, algorithm: Algorithm | None = None
) -> SynchronousSGD:
    """The largest entries, the rest fed back into the next step.

    algorithm: one that is given by itself; None: that of the flag's name.
    Weight decay stays out of the exchange and is therefore not amplified by the momentum, which in dense SGD makes
    it 1/(1 − m) times as strong: that factor is put back here. AdamW's own updates are exchanged, decay and all.
    """
    updates = options.optimizer == "adamw"
    decay = options.weight_decay / (1 - options.momentum)
    return _made(
        options,
        model,
        comm,
        rates,
        adamw(options, model) if updates else SGD(model.parameters(), lr=options.lr, weight_decay=decay),
        algorithm=algorithm,
        updates=updates,
        takes=("teams",),
        compressor=SELECTIONS[options.own.get("select", "topk")](options),
        density=density_by_step(options.own),
        wire=options.own["wire"],
        **({} if updates else {"momentum": options.momentum}),
    )


def _made(
    options: Options,
    model: nn.Module,
    comm: Communicator,
    rates: Rates,
    inner: Optimizer,
    *,
    algorithm: Algorithm | None = None,
    takes: Sequence[str] = (),
    updates: bool = False,
    **settings: Any,
) -> SynchronousSGD:
    """takes: own flags that are the algorithm's `options`, where it has them. updates: they are exchanged."""
    kind: Callable[..., DistributedOptimizer | UpdateOptimizer]
    kind = UpdateOptimizer if updates else partial(DistributedOptimizer, overlap=options.overlap)
    optimizer = kind(
        inner,
        model.named_parameters(),
        comm=comm,
        algorithm=algorithm or options.algorithm,
        options={name: options.own[name] for name in takes if name in options.own},
        nonfinite=options.own["nonfinite"],
        verify=options.own["verify"],
        clip_norm=options.clip_norm,
        **settings,
    )
    skips = options.own["nonfinite"] == "skip"
    return SynchronousSGD(model, optimizer, rates, skips=skips, wait=held_up(options, comm))
