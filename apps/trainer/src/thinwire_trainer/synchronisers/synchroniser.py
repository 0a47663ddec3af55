"""Interface between the training loop and a way of synchronising, and what several of them share.

The loop knows no algorithm, only `Synchroniser`.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from communicators import Communicator, allreduce
from replicas import MuonAdamW, restored
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from thinwire_trainer.command_line.options import Options
from thinwire_trainer.command_line.quantities import NO_DELAY
from thinwire_trainer.errors import AgreedError, RunError

State = dict[str, Any]
Rates = Callable[[Optimizer], LambdaLR]
"""Makes the rate schedule of an optimizer, to be stepped after each of its steps, or as ranks' gradients come in."""


class Synchroniser(ABC):
    """One rank's optimizer, and how its model and the others' become one. The loop calls, on every rank:

        zero_grad();  with gradients(): the task's loss and its backward;  exchange();  update();  average()
                                                         at every step
        settle(), or at the end of the run finish()      after the last step of an epoch
        with averaged_model(comm): …                     around evaluations, and the model's export
        close()                                          at the end, whatever came before

    A subclass overrides what it needs: what sums gradients `exchange`, what averages parameters `average`. Seconds in
    these two, `settle` and `finish` count as communication; what goes on in the background costs bytes only.
    """

    optimizer: Any
    """Wrapper of this rank's optimizer."""
    schedule: LambdaLR
    """Schedule of its rate, by steps."""

    by_rounds = False
    """Whether a rank's step waits for rounds that another rank has to begin, which must not wait for it meanwhile."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def zero_grad(self) -> None:
        """Clear the gradients, before a backward."""
        self.optimizer.zero_grad()

    def clip_limit(self, clip_norm: float) -> float | None:
        """Norm to which the loop clips this rank's gradient; None where the exchange clips it."""
        return clip_norm

    def gradients(self) -> AbstractContextManager[None]:
        """Around forward and backward of a step."""
        return nullcontext()

    def exchange(self) -> None:  # noqa: B027 - some have nothing to exchange before the update
        """Exchange gradients with other ranks, after a backward. Waits as long as this rank cannot go on."""

    @abstractmethod
    def update(self) -> None:
        """This rank's optimizer step, and that of the learning rate, where that does not go by all ranks' gradients."""

    def average(self) -> None:  # noqa: B027 - some have nothing to average after the update
        """Average parameters with other ranks, after the update. Waits as long as this rank cannot go on."""

    def settle(self) -> None:  # noqa: B027 - some have nothing under way
        """Waits for what is under way on this rank, and applies it no earlier than otherwise.

        So an epoch's bytes are its own, however often checkpoints are written.
        """

    def finish(self) -> None:  # noqa: B027 - some have nothing under way
        """This rank has no more steps for now: ends what is under way, and takes part until the others have ended too.

        Called right after the run's last step, and an epoch's where ranks may come and go. A longer run that goes on
        from there begins with what this leaves.
        """

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Lets go of threads and communicators. Waits for nobody: an error may have come before."""

    def averaged_model(self, comm: Communicator) -> AbstractContextManager[None]:
        """Inside, `model` is what the algorithm calls its model, the same on every rank; afterwards this rank's own.

        comm: the ranks; what is sent over it does not count as training.
        """
        return averaged_buffers(self.model, comm)

    @property
    def selection_seconds(self) -> float:
        """Seconds of all calls of `exchange` until now that went into choosing what is sent."""
        return 0.0

    def stats(self) -> Mapping[str, float]:
        """Statistics of the optimizer by the names of `communicators.Stats`; none where it keeps none."""
        own: Callable[[], Mapping[str, float]] = getattr(self.optimizer, "stats", dict)
        return own()

    def counters(self) -> Mapping[str, int | float]:
        """Counts of this rank since the run began, for the metrics of every epoch, such as `hidden_fraction`."""
        return {}

    def remark(self, steps: int) -> str:
        """A line for the user at the end of the run, after so many steps, or none: ""."""
        del steps
        return ""

    def state_dict(self) -> State:
        """All that later steps depend on besides the model, for torch.load(weights_only=True), under its own names.

        What is under way is waited for, as by `settle`, and stored unapplied. Names: none that
        `thinwire_trainer.training.replica.Replica` uses.
        """
        return {"optimizer": self.optimizer.state_dict(), "schedule": self.schedule.state_dict()}

    def load_state_dict(self, state: State) -> None:
        """Goes back to where `state` was taken."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])

    def resized(self, states: Sequence[State], *, before: int, after: int, drop: bool) -> State:
        """The state of this rank, one of as many as there are now, out of those of all ranks that there were.

        states: at an epoch's end, in rank order. before, after: the steps up to there
        as those ranks took them, and as these would have: counts of steps go by epochs, as the rate does. drop: what
        was not sent yet is left behind; otherwise it is carried over, as large in the mean as before.
        RunError where that cannot be; the replica is as it was.
        """
        del states, before, after, drop
        raise RunError(
            "this algorithm goes on with as many ranks only: leave --residuals out, and start as many as then"
        )


@contextmanager
def averaged_buffers(model: nn.Module, comm: Communicator) -> Iterator[None]:
    """Inside the block the model's floating-point buffers are their means over ranks; afterwards, its own again.

    Averaging a copy keeps evaluations, and where they happen, from changing the run. Integer buffers (counters)
    stay as they are, and a mean that is NaN is for the metrics to show.
    """
    buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    if not buffers:
        yield
        return
    with restored(buffers):
        mean = allreduce(torch.cat([buffer.double().flatten() for buffer in buffers]), comm, average=True)
        _fill(buffers, torch.split(mean, [buffer.numel() for buffer in buffers]))
        yield


def _fill(buffers: list[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    for buffer, value in zip(buffers, values, strict=True):
        buffer.copy_(value.view_as(buffer))


class BuffersBefore:
    """The model's buffers as they were before a step's forward, for a step that is not taken after all.

    A batch that makes gradients NaN has made the statistics of its rank NaN, too, and those never forget.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._kept = model, [torch.empty_like(buffer) for buffer in model.buffers()]

    def keep(self) -> None:
        """Note the buffers as they are now."""
        _fill(self._kept, list(self._model.buffers()))

    def restore(self) -> None:
        """Put the buffers back to when `keep` was called."""
        _fill(list(self._model.buffers()), self._kept)


def inner_optimizer(options: Options, model: nn.Module) -> Optimizer:
    """Optimizer with its own moments; its wrapper exchanges gradients before it, or models after."""
    if options.optimizer == "adamw":
        return adamw(options, model)
    if options.optimizer == "muon":
        try:
            return MuonAdamW(model, options.lr, weight_decay=options.weight_decay, momentum=options.momentum)
        except (ValueError, ImportError) as error:
            raise AgreedError(f"--optimizer muon: {error}") from error
    return SGD(
        model.parameters(),
        lr=options.lr,
        momentum=options.momentum,
        weight_decay=options.weight_decay,
        nesterov=options.nesterov,
    )


def adamw(options: Options, model: nn.Module) -> AdamW:
    """Its momentum is β₁; β₂ is torch's 0.999."""
    betas = options.momentum, 0.999
    return AdamW(model.parameters(), lr=options.lr, betas=betas, weight_decay=options.weight_decay)


def held_up(options: Options, comm: Communicator) -> Callable[[int], None]:
    """Waits, at a step's beginning, as long as --inject-delay says of this rank and step; without it not at all."""
    text = options.own.get("inject_delay", NO_DELAY)
    if text in ("", NO_DELAY):
        return lambda step: None
    from partial_collectives import injected_delays

    try:
        seconds = injected_delays(text, comm.rank, comm.size, seed=options.seed)
    except ValueError as error:
        raise AgreedError(f"--inject-delay: {error}") from error

    def wait(step: int) -> None:
        if late := seconds(step):
            began = comm.clock()
            comm.elapse(late)
            if comm.clock() - began < late / 2:  # a real clock, which goes by itself
                time.sleep(late)

    return wait


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
    """Convert a count of `before` steps to `after` steps: none stays none, and all stays all."""
    return count * after // max(before, 1)
