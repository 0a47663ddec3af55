"""One rank's whole run: from checked options to the trained model."""

import platform
from dataclasses import asdict

import torch
from communicators import Communicator

from trainer.agreement import require_same, together
from trainer.app import App
from trainer.buffers import averaged_buffers
from trainer.clock import clock_of
from trainer.events import Events
from trainer.loop import Training, train
from trainer.options import Options
from trainer.progress import TrainingProgress
from trainer.replica import Replica
from trainer.resume import resume
from trainer.run_folder import RunFolder
from trainer.schedule import rate_schedule
from trainer.seeds import AUGMENT, DROPOUT, derived_seed
from trainer.sharding import steps_per_epoch
from trainer.synchronisation import SYNCHRONISATIONS
from trainer.task import Task

CPU = torch.device("cpu")


def run(app: App, options: Options, comm: Communicator, *, device: torch.device = CPU) -> None:
    """Train as `options` say, on every rank of `comm`. Results are in `options.output`.

    device: this rank's (see `trainer.device.own_device`).
    """
    require_same(options.settings(), comm)
    torch.manual_seed(options.seed)  # the model starts alike on all ranks
    with together(comm):
        task = app.build(options, device)
    replica = _replica(task, options, comm)
    folder = RunFolder(options.output)
    steps = steps_per_epoch(task.train_size, size=comm.size, batch_size=options.batch_size)
    progress = TrainingProgress(
        options.algorithm, epochs=options.max_epochs, steps_per_epoch=steps, quiet=comm.rank != 0
    )
    with progress:
        first_step = _begin(folder, replica, options, comm, device, progress)
        events = (
            Events(folder.path / "events", first_step=first_step) if options.tensorboard and not comm.rank else None
        )
        train(
            Training(
                task=task,
                replica=replica,
                comm=comm,
                options=options,
                folder=folder,
                progress=progress,
                clock=clock_of(device),
                events=events,
            )
        )
        _export(task, folder, comm)
        progress.note(f"{options.algorithm}: metrics and model in {folder.path}")


def _replica(task: Task, options: Options, comm: Communicator) -> Replica:
    optimizer = SYNCHRONISATIONS[options.algorithm](options, task.model, comm)
    schedule = rate_schedule(
        optimizer,
        steps_per_epoch=steps_per_epoch(task.train_size, size=comm.size, batch_size=options.batch_size),
        epochs=options.max_epochs,
        warmup_epochs=options.warmup_epochs,
        shape=options.lr_schedule,
    )
    torch.manual_seed(derived_seed(options.seed, DROPOUT, comm.rank))
    generator = torch.Generator().manual_seed(derived_seed(options.seed, AUGMENT, comm.rank))
    return Replica(model=task.model, optimizer=optimizer, schedule=schedule, generator=generator)


def _begin(
    folder: RunFolder,
    replica: Replica,
    options: Options,
    comm: Communicator,
    device: torch.device,
    progress: TrainingProgress,
) -> int:
    """A new folder, or an old one to go on with; returns the first step."""
    if options.resume is None:
        with together(comm):
            if comm.rank == 0:
                folder.begin(_config(replica, options, comm, device), overwrite=options.overwrite)
        return 0
    step = resume(replica, folder, options.resume, options.settings(), comm)
    if step is None:
        progress.note(f"{folder.path} holds no checkpoint yet: starting from the beginning")
    else:
        progress.note(f"resumed {folder.path} at step {step}")
    return step or 0


def _config(replica: Replica, options: Options, comm: Communicator, device: torch.device) -> dict[str, object]:
    given = {name: str(value) if hasattr(value, "parts") else value for name, value in asdict(options).items()}
    return given | {
        "world_size": comm.size,
        "parameters": sum(parameter.numel() for parameter in replica.model.parameters()),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _export(task: Task, folder: RunFolder, comm: Communicator) -> None:
    with averaged_buffers(task.model, comm), together(comm):
        if comm.rank == 0:
            torch.save(task.model.state_dict(), folder.model)
