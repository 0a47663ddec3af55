"""Training by ranks that come and go (`communicators.Elastic`): samples are dealt to whoever is there.

An epoch's end, with its evaluation, metrics and checkpoint, is one atomic exchange: where a rank dies in it, the others
do all of it again, and whoever is rank 0 then writes.
"""

from dataclasses import asdict, replace
from typing import Any

import torch
from communicators import Elastic

from thinwire_trainer.agreement import all_or_none, gather_texts
from thinwire_trainer.command_line.options import Options
from thinwire_trainer.errors import RunError
from thinwire_trainer.training.batches import SAMPLES, SHUFFLE, derived_seed, train_input
from thinwire_trainer.training.loop import Training, end, end_epoch, report, save_if_due, take_step
from thinwire_trainer.training.replica import Position, Totals

State = dict[str, Any]
BEGINNING = {"resume", "residuals", "overwrite"}
"""Flags that nobody who joins has a use for."""


class Course:
    """Flags of those who train, and where they are, carried to newcomers: each rank makes one before its optimizer.

    first: epoch that the samples were first dealt in, 0 unless the run was resumed. ended: whether the steps of the
    epoch are over.
    """

    def __init__(self, options: Options) -> None:
        self._alike = {name: value for name, value in options.alike().items() if name not in BEGINNING}
        self._given = State()
        self.first, self.ended = 0, False

    def begin(self, training: Training) -> None:
        """Go on where the others are, or begin where this rank is."""
        self._training, replica, given = training, training.replica, self._given
        self.first = replica.position.epoch
        if not given:
            return
        self.first, self.ended = given["first"], given["ended"]
        replica.position = Position(**given["position"])
        replica.synchroniser.schedule.load_state_dict(given["schedule"])
        for group, rate in zip(replica.synchroniser.optimizer.param_groups, given["schedule"]["_last_lr"], strict=True):
            group["lr"] = rate
        for name, buffer in replica.model.named_buffers():
            buffer.copy_(given["buffers"][name])

    def state_dict(self) -> State:
        """Flags, position, rate, and buffers, which optimizers do not all carry."""
        replica = self._training.replica
        return {
            "alike": self._alike,
            "first": self.first,
            "ended": self.ended,
            "position": asdict(replica.position),
            "schedule": replica.synchroniser.schedule.state_dict(),
            "buffers": dict(replica.model.named_buffers()),
        }

    def load_state_dict(self, state: State) -> None:
        """Take what the others gave; RunError where this rank was started with other flags."""
        for name, own in self._alike.items():
            if (theirs := state["alike"].get(name)) != own:
                flag = f"--{name.replace('_', '-')}"
                raise RunError(
                    f"those who train were started with {flag} {theirs}, this rank with {flag} {own}: start all ranks "
                    f"with the same flags"
                )
        self._given = state


def train_elastic(training: Training, world: Elastic, course: Course) -> None:
    """Train from the replica's position, or a newcomer from that of the others, to the last epoch."""
    replica, last = training.replica, training.options.max_epochs - 1
    course.begin(training)
    joins, training.comm.joining = training.comm.joining, False
    told = f"joins in epoch {replica.position.epoch + 1}" if joins else "begins"
    training.progress.say(f"rank {world.rank} of {world.size} {told}")
    training.task.model.train()
    replica.meter.begin()
    while replica.position.epoch <= last:
        if not course.ended:
            train_epoch(training, world, course)
        course.ended = True
        end(training, replica.synchroniser.finish)  # ranks may have taken different numbers of steps
        close_epoch(training, world)
        course.ended = False


def train_epoch(training: Training, world: Elastic, course: Course) -> None:
    """The rest of the epoch. Nothing is read ahead: what a rank has drawn it must train on."""
    options, task, epoch = training.options, training.task, training.replica.position.epoch
    seed = derived_seed(options.seed, SAMPLES, epoch)
    batches = world.deal(
        range(task.train_size),
        batch_size=options.batch_size,
        seed=derived_seed(options.seed, SHUFFLE, course.first) >> 32,
        epochs=epoch + 1 - course.first,
        collate_fn=torch.tensor,
    )
    with training.phases.forward_of(task.model):
        for indices in batches:
            take_step(training, train_input(task, [indices], seed=seed, readers=0), samples=len(indices))


def close_epoch(training: Training, world: Elastic) -> None:
    """Evaluation, metrics and checkpoint: of all ranks that are there when it is over."""
    replica, metrics = training.replica, training.folder.metrics
    position, totals, written = replica.position, replica.totals, metrics.nbytes()  # before rank 0 can have written

    def close() -> None:
        taken = max(int(steps) for steps in gather_texts(str(position.step), training.comm))
        replica.position, replica.totals = replace(position, step=taken), replace(totals)
        row = end_epoch(training)
        with all_or_none(training.comm):
            if training.comm.rank == 0:
                metrics.truncate(written)  # what a rank 0 that has died has written
            report(training, row)
        steps, epoch = training.steps, position.epoch + 1
        replica.position, replica.totals = Position(epoch, since_epoch=epoch, since_step=steps), Totals()
        save_if_due(training)

    world.atomic(close)
