"""The training loop: epochs of steps, an evaluation after each, checkpoints in between."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from communicators import Communicator, allgather, allreduce

from thinwire_trainer.agreement import AgreedStop, all_or_none
from thinwire_trainer.app import LeavesOut, Task
from thinwire_trainer.command_line.options import Options
from thinwire_trainer.errors import RunError, Stopped
from thinwire_trainer.launching.device import Clock
from thinwire_trainer.records.metrics import Events, Row, TrainingProgress, require_metrics
from thinwire_trainer.records.run_folder import RunFolder
from thinwire_trainer.records.trace import Trace
from thinwire_trainer.training.batches import (
    SAMPLES,
    batches_of,
    derived_seed,
    shard_of,
    test_input,
    train_input,
    weight_of,
)
from thinwire_trainer.training.phases import PHASES, Phases
from thinwire_trainer.training.preparation import dense_gradients
from thinwire_trainer.training.replica import Replica, Totals


@dataclass(kw_only=True)
class Training:
    """Everything that one rank's training needs: model, ranks, settings, and where it reports."""

    task: Task
    replica: Replica
    comm: Communicator  # the ranks, for all but what the synchroniser does: see `ControlCommunicator`
    options: Options
    steps_per_epoch: int  # the same on every rank
    folder: RunFolder
    progress: TrainingProgress
    clock: Clock
    phases: Phases
    autocast: Callable[[], AbstractContextManager[object]] = nullcontext  # of a forward
    trace: Trace | None = None  # --profile
    stop: AgreedStop | None = None  # where signals are waited for
    events: Events | None = None  # TensorBoard, rank 0
    publish: Callable[[], object] = lambda: None  # statistics, after each step

    @property
    def steps(self) -> int:
        """Steps taken since the beginning of the run."""
        return self.replica.position.taken(self.steps_per_epoch)

    def stats(self) -> Mapping[str, float]:
        """Statistics of the run on this rank, its steps among them."""
        return {**self.replica.synchroniser.stats(), "steps": self.steps}

    def note(self, text: str) -> None:
        """One line for the user, from rank 0; for every rank to call. AgreedError if it cannot be written."""
        with all_or_none(self.comm):
            self.progress.note(text)


def train(training: Training) -> None:
    """Train from the replica's position to the last epoch. Raises Stopped where a signal asks for an earlier end."""
    training.task.model.train()
    training.replica.meter.begin()
    while training.replica.position.epoch < training.options.max_epochs:
        stopped_by = train_epoch(training)
        row = end_epoch(training)
        with all_or_none(training.comm):
            report(training, row)
        position = training.replica.position
        training.replica.position = replace(position, epoch=position.epoch + 1, step=0)
        training.replica.totals = Totals()
        save_if_due(training)
        if stopped_by and training.replica.position.epoch < training.options.max_epochs:
            stop(training, stopped_by)
    if training.stop:
        training.stop.close()


def stop(training: Training, number: int) -> None:
    """Ends the run at this step, on every rank: with a checkpoint, unless there is one."""
    if not is_due(training):
        save(training)
    raise Stopped(number, training.steps)


def report(training: Training, row: Row) -> None:
    """The end of an epoch, to the disk and the user; rank 0 does it for all."""
    training.progress.speaks(training.comm.rank == 0)
    if training.comm.rank == 0:
        if training.options.tensorboard and not training.events:  # of a rank 0 that has died
            training.events = Events(training.folder.events, first_step=training.steps)
        training.folder.metrics.append(row)
        training.progress.epoch(row)
        if training.events:
            training.events.write(row, training.stats())


def train_epoch(training: Training) -> int:
    """The rest of the epoch that the replica is in; returns the signal that asked for the end after its last step."""
    position, options, batches = training.replica.position, training.options, batches_of(training.task)
    shard = shard_of(batches, options, training.comm, epoch=position.epoch, steps=training.steps_per_epoch)
    seed, rest = derived_seed(options.seed, SAMPLES, position.epoch), shard[position.step :]
    read = closing(train_input(training.task, rest, seed=seed, readers=options.readers))
    stopped_by = 0
    with training.phases.forward_of(training.task.model), read as batches_read:
        for name in rest:
            stopped_by = take_step(training, batches_read, samples=weight_of(batches, name))
            if position.step < len(shard):  # the end of an epoch is saved after its evaluation
                save_if_due(training)
                if stopped_by:
                    stop(training, stopped_by)
    synchroniser = training.replica.synchroniser
    end(training, synchroniser.finish if position.epoch + 1 == options.max_epochs else synchroniser.settle)
    return stopped_by


def take_step(training: Training, read: Iterator[Any], *, samples: int) -> int:
    """One step of the run, counted, timed and told; returns the signal by which all ranks stop after it, or 0."""
    began, position = training.clock(), training.replica.position
    loss = train_step(training, read, samples=samples)
    position.step += 1
    training.progress.step(position.scheduled(training.steps_per_epoch), loss)
    training.publish()
    stopped_by = training.stop.after(training.steps) if training.stop else 0
    training.replica.totals.seconds += training.clock() - began
    if training.trace:
        training.trace.step()
    return stopped_by


def train_step(training: Training, read: Iterator[Any], *, samples: int) -> float:
    """One step on this rank's next batch, which weighs so much; returns the batch's mean loss."""
    replica, synchroniser, phases = training.replica, training.replica.synchroniser, training.phases
    phases.enter("update")
    synchroniser.zero_grad()
    with synchroniser.gradients(), replica.model_generator:
        phases.enter("data")
        batch = next(read)
        with training.autocast(), _normalised(samples):
            loss = training.task.loss(batch, replica.generator)
        phases.enter("backward")
        with dense_gradients(replica.model) if replica.position.step == 0 else nullcontext():  # it walks the model
            loss.backward()  # type: ignore[no-untyped-call]
    if training.options.clip_norm is not None and (limit := synchroniser.clip_limit(training.options.clip_norm)):
        torch.nn.utils.clip_grad_norm_(replica.model.parameters(), limit)
    phases.enter("exchange")
    selected = synchroniser.selection_seconds
    synchroniser.exchange()
    selected = synchroniser.selection_seconds - selected
    phases.enter("update")
    synchroniser.update()
    phases.enter("exchange")
    synchroniser.average()
    value = loss.item()  # waits for the device
    seconds = phases.end()
    selected = min(selected, seconds["exchange"])
    replica.totals.add(seconds | {"exchange": seconds["exchange"] - selected, "selection": selected})
    replica.totals.loss += value * samples
    replica.totals.samples += samples
    return value


@contextmanager
def _normalised(samples: int) -> Iterator[None]:
    """RunError for a batch that is too small for batch normalisation."""
    try:
        yield
    except ValueError as error:
        if not str(error).startswith("Expected more than 1 value per channel"):
            raise
        raise RunError(
            f"batch normalisation needs more than one value per channel, and a batch of {samples} has one: give a "
            f"greater --batch-size"
        ) from None


def end(training: Training, part: Callable[[], None]) -> None:
    """Run and time the synchroniser's part after the last step."""
    began = training.clock()
    part()
    seconds = training.clock() - began
    training.replica.totals.add({"exchange": seconds})
    training.replica.totals.seconds += seconds


def end_epoch(training: Training) -> Row:
    """Evaluate, and sum the epoch up over ranks; seconds are this rank's."""
    replica, totals, comm = training.replica, training.replica.totals, training.comm
    if training.trace:
        training.trace.share(comm, last=replica.position.epoch + 1 == training.options.max_epochs)
    replica.count_bytes()
    began = training.clock()
    tested = evaluate(
        training.task,
        comm,
        replica.synchroniser.averaged_model(comm),
        replica.model_generator,
        readers=training.options.readers,
    )
    evaluated = training.clock() - began
    totals.evaluation_seconds += evaluated
    totals.seconds += evaluated
    loss, samples = allreduce(torch.tensor([totals.loss, totals.samples], dtype=torch.float64), comm).tolist()
    bytes_sent = allgather(torch.tensor([totals.bytes_sent]), comm)
    before: Row = {"epoch": replica.position.epoch + 1, "steps": training.steps, "train_loss": loss / samples}
    after: Row = {
        "seconds": totals.seconds,
        "compute_seconds": totals.compute_seconds,
        "communication_seconds": totals.communication_seconds,
        **{f"{name}_seconds": getattr(totals, f"{name}_seconds") for name in (*PHASES, "evaluation", "rest")},
        "bytes_sent": max(int(sent) for sent in bytes_sent),
        "algorithm": training.options.algorithm,
        "world_size": comm.size,
        **replica.synchroniser.counters(),
        **(training.task.faults.counted() if isinstance(training.task, LeavesOut) else {}),
    }
    with all_or_none(comm):
        require_metrics(tested, own={*before, *after})
    return {name: _written(value) for name, value in (before | tested | after).items()}


def _written(value: float | str | None) -> float | str | None:
    """JSON has no word for a loss that is infinite or not a number: null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def save_if_due(training: Training) -> None:
    """Write a checkpoint if --checkpoint-every asks for one at this step."""
    if is_due(training):
        save(training)


def is_due(training: Training) -> bool:
    """Whether --checkpoint-every asks for a checkpoint at this step."""
    every, position = training.options.checkpoint_every, training.replica.position
    ended = position.epoch == training.options.max_epochs
    return position.step == 0 if every is None else every > 0 and (training.steps % every == 0 or ended)


def save(training: Training) -> None:
    """Write a checkpoint; AgreedError, before anything is written, where it could not be loaded again."""
    state = training.replica.state_dict()
    with all_or_none(training.comm):
        training.replica.require_loadable(state)
    training.folder.checkpoints.save(
        training.steps,
        state,
        training.comm,
        metrics=training.folder.metrics,
        settings=training.options.settings(),
    )


@torch.no_grad()
def evaluate(
    task: Task,
    comm: Communicator,
    averaged: AbstractContextManager[None],
    drawing: AbstractContextManager[None],
    *,
    readers: int = 0,
) -> dict[str, float]:
    """The task's test metrics, the same on every rank.

    averaged: inside it all ranks have the same model. drawing: inside it torch's random numbers are this rank's.
    """
    task.model.eval()
    shards = batches_of(task).test_batches(rank=comm.rank, size=comm.size)
    with averaged, closing(test_input(task, shards, readers=readers)) as batches, drawing:
        sums = torch.stack([task.score(batch) for batch in batches]).sum(0)
    task.model.train()
    return task.metrics(allreduce(sums, comm))
