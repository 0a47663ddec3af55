"""One rank's whole run: from checked options to the trained model."""

import platform
from dataclasses import asdict, replace
from pathlib import Path

import torch
from communicators import Communicator

from trainer.app import App
from trainer.command_line.options import Options
from trainer.launching.same_on_all import require_same, together
from trainer.records.durable import write_tensors
from trainer.records.events import Events
from trainer.records.folder_lock import locked
from trainer.records.progress import TrainingProgress
from trainer.records.run_folder import RunFolder
from trainer.resuming.resume import resume
from trainer.task import Task
from trainer.training.buffers import averaged_buffers
from trainer.training.clock import clock_of
from trainer.training.learning_rate import rate_schedule
from trainer.training.loop import Training, train
from trainer.training.replica import Replica
from trainer.training.seeds import AUGMENT, DROPOUT, derived_seed
from trainer.training.sharding import steps_per_epoch
from trainer.training.synchronisation import SYNCHRONISATIONS

CPU = torch.device("cpu")


def run(app: App, options: Options, comm: Communicator, *, device: torch.device = CPU) -> None:
    """Train as `options` say, on every rank of `comm`. Results are in `options.output`.

    device: this rank's (see `trainer.launching.device.own_device`). AgreedError where a user can mend what is wrong.
    """
    require_same(options.alike(), comm)
    torch.manual_seed(options.seed)  # the model starts alike on all ranks
    with together(comm):
        task = app.build(options, device)
    training = _training(task, options, comm, device)
    with together(comm):
        if comm.rank == 0:
            training.folder.prepare(resume=options.resume is not None)
    with training.progress, locked(options.output, comm, note=training.progress.note):
        first_step = _begin(training, device)
        train(_reporting(training, first_step))
        _export(training)
        if skipped := training.replica.optimizer.skipped:
            training.note(f"{skipped} of {training.steps} steps were skipped: their gradient was not finite")
        training.note(f"{options.algorithm}: metrics and model in {options.output}")


def _reporting(training: Training, first_step: int) -> Training:
    """With TensorBoard, where asked for."""
    events = None
    with together(training.comm):
        if training.options.tensorboard and training.comm.rank == 0:
            events = Events(training.options.output / "events", first_step=first_step)
    return replace(training, events=events)


def _training(task: Task, options: Options, comm: Communicator, device: torch.device) -> Training:
    steps = steps_per_epoch(task.train_size, size=comm.size, batch_size=options.batch_size)
    return Training(
        task=task,
        replica=_replica(task, options, comm, steps),
        comm=comm,
        options=options,
        folder=RunFolder(options.output),
        progress=TrainingProgress(
            options.algorithm, epochs=options.max_epochs, steps_per_epoch=steps, quiet=comm.rank != 0
        ),
        clock=clock_of(device),
    )


def _replica(task: Task, options: Options, comm: Communicator, steps: int) -> Replica:
    optimizer = SYNCHRONISATIONS[options.algorithm](options, task.model, comm)
    schedule = rate_schedule(
        optimizer,
        steps_per_epoch=steps,
        epochs=options.max_epochs,
        warmup_epochs=options.warmup_epochs,
        shape=options.lr_schedule,
    )
    torch.manual_seed(derived_seed(options.seed, DROPOUT, comm.rank))
    generator = torch.Generator().manual_seed(derived_seed(options.seed, AUGMENT, comm.rank))
    return Replica(model=task.model, optimizer=optimizer, schedule=schedule, generator=generator)


def _begin(training: Training, device: torch.device) -> int:
    """A new folder, or an old one to go on with; returns the first step."""
    options, folder, comm = training.options, training.folder, training.comm
    if options.resume is None:
        with together(comm):
            if comm.rank == 0:
                folder.begin(_config(training, device), overwrite=options.overwrite)
        return 0
    step = resume(training.replica, folder, options, comm, steps_per_epoch=training.steps_per_epoch)
    if step is None:
        training.note(f"{folder.path} holds no checkpoint yet: starting from the beginning")
        return 0
    training.note(f"resumed {folder.path} at step {step}")
    return step


def _config(training: Training, device: torch.device) -> dict[str, object]:
    given = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(training.options).items()}
    return given | {
        "world_size": training.comm.size,
        "parameters": sum(parameter.numel() for parameter in training.task.model.parameters()),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _export(training: Training) -> None:
    with averaged_buffers(training.task.model, training.comm), together(training.comm):
        if training.comm.rank == 0:
            write_tensors(training.folder.model, training.task.model.state_dict())
