"""One rank's training, whatever exchanges: the same data, rates, clipping and places of the curve."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from bench.convergence.tasks import TASKS
from bench.convergence.ways import Run

Point = tuple[int, float, int, int]
"""Steps that were taken, the score after them, bytes and messages that a rank has sent in them.

What made the models alike, before the first step, is not among them.
"""


def _nothing() -> None:
    pass


class Training(NamedTuple):
    """What a rank trains with, made of the same initial model on all ranks.

    model: what is scored. calls: what computes the loss, the model or DDP round it. optimizer: has the rates.
    step: after backward. sent: () -> bytes and messages that this rank has sent. before_clipping: makes the gradients
    what is clipped. around: what forward and backward go inside. rates: whether they are to be
    changed after each step, as the optimizer does not do it. meet: has ranks meet that do not wait for each other.
    agreed: inside, the model is that of all ranks. finish: after the last step.
    """

    model: nn.Module
    calls: nn.Module
    optimizer: Optimizer
    step: Callable[[], object]
    sent: Callable[[], tuple[int, int]]
    before_clipping: Callable[[], object] = _nothing
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    rates: bool = True
    meet: Callable[[], object] = _nothing
    agreed: Callable[[], AbstractContextManager[Any]] = nullcontext
    finish: Callable[[], object] = _nothing


def curve_of(run: Run, training: Training, *, rank: int, size: int, clip_after: float) -> list[Point]:
    """Trains. Scores are rank 0's, NaN elsewhere.

    clip_after: of the norm of the gradients, between backward and the step; 0 for none.
    """
    task, model, curve = TASKS[run.task], training.model, list[Point]()
    schedule = rates_of(training.optimizer, run.steps) if training.rates else None
    every, (bytes_before, messages_before) = max(1, run.steps // task.points), training.sent()
    for step in range(run.steps):
        training.optimizer.zero_grad()
        with training.around():
            task.loss(training.calls, seed=run.seed, rank=rank, size=size, step=step).backward()  # type: ignore[no-untyped-call]
        if clip_after:
            training.before_clipping()
            nn.utils.clip_grad_norm_(model.parameters(), clip_after)
        training.step()
        if schedule is not None:
            schedule.step()
        ended = step + 1 == run.steps
        if (step + 1) % every == 0 or ended:
            (training.finish if ended else training.meet)()
            with training.agreed():
                score = task.score(model) if rank == 0 else math.nan
            nbytes, messages = training.sent()
            curve.append((step + 1, score, nbytes - bytes_before, messages - messages_before))
    return curve


def rates_of(optimizer: Optimizer, steps: int) -> LambdaLR:
    """Linear over the first twentieth, then a cosine."""

    def share(step: int) -> float:
        return min(1.0, (step + 1) / max(1, steps // 20)) * 0.5 * (1 + math.cos(math.pi * min(step, steps) / steps))

    return LambdaLR(optimizer, share)
