"""What the training loop asks of a way of synchronising. The loop knows no algorithm, only this."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from communicators import Communicator
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from thinwire_trainer.errors import RunError
from thinwire_trainer.synchronisers.buffers import averaged_buffers

State = dict[str, Any]
Rates = Callable[[Optimizer], LambdaLR]
"""Makes the rate schedule of an optimizer, to be stepped after each of its steps, or once a round."""


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

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @abstractmethod
    def zero_grad(self) -> None:
        """Before a backward."""

    def clip_limit(self, clip_norm: float) -> float | None:
        """What --clip-norm holds this rank's gradient to, by the loop; None where the exchange does it."""
        return clip_norm

    def gradients(self) -> AbstractContextManager[None]:
        """Around forward and backward of a step."""
        return nullcontext()

    def exchange(self) -> None:  # noqa: B027 - some have nothing to exchange before the update
        """After a backward: gradients with other ranks. Waits as long as this rank cannot go on."""

    @abstractmethod
    def update(self) -> None:
        """This rank's optimizer step, and that of the learning rate, where it does not go by rounds."""

    def average(self) -> None:  # noqa: B027 - some have nothing to average after the update
        """After the update: parameters with other ranks. Waits as long as this rank cannot go on."""

    def settle(self) -> None:  # noqa: B027 - some have nothing under way
        """Waits for what is under way on this rank, and applies it no earlier than otherwise.

        So an epoch's bytes are its own, however often checkpoints are written.
        """

    def finish(self) -> None:  # noqa: B027 - some have nothing under way
        """This rank has no more steps for now: ends what is under way, and takes part until the others have ended too.

        Called once, right after the run's last step. A longer run that goes on from there begins with what this leaves.
        """

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Lets go of threads and communicators. Waits for nobody: an error may have come before."""

    def averaged_model(self, comm: Communicator) -> AbstractContextManager[None]:
        """Inside, `model` is what the algorithm calls its model, the same on every rank; afterwards this rank's own.

        comm: the ranks; what is sent over it does not count as training.
        """
        return averaged_buffers(self.model, comm)

    @property
    def bytes_elsewhere(self) -> int:
        """Bytes that this rank has sent so far over a communicator that is neither the run's own nor made of it."""
        return 0

    @property
    def selection_seconds(self) -> float:
        """Of all calls of `exchange` until now, what went into choosing what is sent."""
        return 0.0

    def counters(self) -> Mapping[str, int | float]:
        """What this rank has counted since the run began, for the metrics of every epoch, such as `hidden_fraction`."""
        return {}

    def remark(self, steps: int) -> str:
        """A line for the user at the end of the run, after so many steps, or none: ""."""
        del steps
        return ""

    @abstractmethod
    def state_dict(self) -> State:
        """All that later steps depend on besides the model, for torch.load(weights_only=True), under its own names.

        What is under way is waited for, as by `settle`, and stored unapplied. Names: none that
        `thinwire_trainer.training.replica.Replica` uses.
        """

    @abstractmethod
    def load_state_dict(self, state: State) -> None:
        """Goes back to where `state` was taken."""

    @abstractmethod
    def fitted(self, state: State, *, step: int) -> State:
        """`state`, completed by what older versions of a library did not write; of one that has taken no step.

        Raises DamagedError, naming the place, unless this synchroniser could have written it after so many steps: what
        is not looked at here may be half loaded, or stop training later. Changes nothing. The tools for that are in
        `thinwire_trainer.resuming.likeness` and `thinwire_trainer.synchronisers.optimizer_state`.
        """

    def resized(self, states: Sequence[State], *, before: int, after: int, drop: bool) -> State:
        """The state of this rank, one of as many as there are now, out of those of all ranks that there were.

        states: at an epoch's end, in rank order; each is looked at as by `fitted`. before, after: the steps up to there
        as those ranks took them, and as these would have: counts of steps go by epochs, as the rate does. drop: what
        was not sent yet is left behind; otherwise it is carried over, as large in the mean as before.
        RunError where that cannot be; the replica is as it was.
        """
        del states, before, after, drop
        raise RunError(
            "this algorithm goes on with as many ranks only: leave --residuals out, and start as many as then"
        )
