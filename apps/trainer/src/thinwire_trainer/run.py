"""One rank's whole run: from checked options to the trained model."""

import json
import platform
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from communicators import Communicator

from thinwire_trainer.all_or_none import GO_ON, START_AGAIN, all_or_none, require_same
from thinwire_trainer.app import App, Carries, Keeps, LeavesOut, Task
from thinwire_trainer.command_line.flags import table_of
from thinwire_trainer.command_line.options import Options, Settings
from thinwire_trainer.errors import RunError
from thinwire_trainer.launching.device import clock_of
from thinwire_trainer.launching.ending import StopRequest
from thinwire_trainer.records.durable import write_tensors
from thinwire_trainer.records.folder_lock import locked, naming_holder
from thinwire_trainer.records.progress import Events, TrainingProgress
from thinwire_trainer.records.run_folder import RunFolder
from thinwire_trainer.records.trace import Trace
from thinwire_trainer.resuming.carried import template_of
from thinwire_trainer.resuming.resume import require_same_run, resume
from thinwire_trainer.synchronisers.automatic import settled
from thinwire_trainer.synchronisers.synchroniser import Rates, Synchroniser
from thinwire_trainer.synchronisers.table import owners
from thinwire_trainer.training.aside import Aside, Meter
from thinwire_trainer.training.dealing import agreed_steps, batches_of, steps_of
from thinwire_trainer.training.dense_embeddings import make_dense
from thinwire_trainer.training.faster import autocast, compile_forward
from thinwire_trainer.training.learning_rate import rate_schedule
from thinwire_trainer.training.loop import Training, train
from thinwire_trainer.training.phases import Phases, stopwatch_of
from thinwire_trainer.training.replica import Replica
from thinwire_trainer.training.sharding import AUGMENT, DROPOUT, derived_seed
from thinwire_trainer.training.stopping import AgreedStop

CPU = torch.device("cpu")


def run(
    app: App,
    options: Options,
    comm: Communicator,
    *,
    device: torch.device = CPU,
    request: StopRequest | None = None,
) -> None:
    """Train as `options` say, on every rank of `comm`. Results are in `options.output`.

    device: this rank's (see `thinwire_trainer.launching.device.own_device`).
    request: how signals reach the loop; of all ranks, or of none.
    AgreedError where a user can mend what is wrong; Stopped, on all ranks, where a signal asked for the end.
    """
    aside = Aside(comm)
    require_same(options.alike(), aside)
    torch.manual_seed(options.seed)  # the model starts alike on all ranks
    with all_or_none(aside):
        task = app.build(options, device)
        make_dense(task.model)
        compile_forward(task.model, options, device)
        casting = autocast(options, device)
    options, choice = settled(options, task.model, comm, table_of(app))
    steps = agreed_steps(batches_of(task), options, aside)
    make = table_of(app)[options.algorithm].make
    with closing(make(options, task.model, comm, _rates(options, steps))) as synchroniser:
        meter = Meter(comm, aside, lambda: synchroniser.bytes_elsewhere)
        with all_or_none(aside):
            replica = _replica(task, synchroniser, meter, options, comm.rank)
        training = _training(task, replica, options, aside, device, steps)
        training = replace(training, autocast=casting)
        with all_or_none(aside, advice=_advice(options)), naming_holder(options.output):
            if comm.rank == 0:
                _require_possible(app, training)  # before others are kept out, and again when they are
        note, advice = training.progress.note, _advice(options)
        with training.progress, locked(options.output, aside, note=note, advice=advice):
            first_step = _begin(app, training, device, choice)
            if choice:
                training.note(f"{choice} (when the run began)" if options.resume else choice)
            if late := options.not_reached():
                training.note(late)
            if isinstance(task, LeavesOut) and (left_out := task.faults.told()):
                training.note(left_out)
            with _traced(training) as traced, _stopped_by(request, traced, first_step) as stoppable:
                train(_reporting(stoppable, first_step))
            _end(training)


@contextmanager
def _stopped_by(request: StopRequest | None, training: Training, first_step: int) -> Iterator[Training]:
    """A signal is answered by the loop, unless there is no use in that: no checkpoint is wanted."""
    if request is None or training.options.checkpoint_every == 0:
        yield training
        return
    with request.deferred():
        yield replace(training, stop=AgreedStop(training.comm, lambda: request.number, first_step=first_step))


@contextmanager
def _traced(training: Training) -> Iterator[Training]:
    """With a trace of some steps, where asked for."""
    if not (training.options.profile and training.comm.rank == 0):
        yield training
        return
    trace = Trace(training.folder.trace)
    try:
        yield replace(training, trace=trace)
    finally:
        trace.close()


def _own_flags(app: App, algorithm: str) -> Settings:
    """Of all algorithms, and the app's; see `in_todays_terms`."""
    table = table_of(app)
    own = {flag.name: flag.default for flag in table[algorithm].flags}
    apps: Settings = {flag.name: flag.default for flag in app.flags}
    return apps | {name: own.get(name) for name in owners(table)}


def _end(training: Training) -> None:
    """The model, and what the user should know."""
    with training.replica.synchroniser.averaged_model(training.comm), all_or_none(training.comm):
        if training.comm.rank == 0:
            write_tensors(training.folder.model, training.task.model.state_dict())
    if remark := training.replica.synchroniser.remark(training.steps):
        training.note(remark)
    training.note(f"{training.options.algorithm}: metrics and model in {training.options.output}")


def _reporting(training: Training, first_step: int) -> Training:
    """With TensorBoard, where asked for."""
    events = None
    with all_or_none(training.comm):
        if training.options.tensorboard and training.comm.rank == 0:
            events = Events(training.folder.events, first_step=first_step)
    return replace(training, events=events)


def _training(
    task: Task, replica: Replica, options: Options, comm: Aside, device: torch.device, steps: int
) -> Training:
    return Training(
        task=task,
        replica=replica,
        comm=comm,
        options=options,
        steps_per_epoch=steps,
        folder=RunFolder(options.output, options.keep),
        progress=TrainingProgress(
            options.algorithm, epochs=options.max_epochs, steps_per_epoch=steps, quiet=comm.rank != 0
        ),
        clock=clock_of(device),
        phases=Phases(stopwatch_of(device)),
    )


def _rates(options: Options, steps: int) -> Rates:
    return partial(
        rate_schedule,
        steps_per_epoch=steps,
        epochs=options.max_epochs,
        warmup_epochs=options.warmup_epochs,
        shape=options.lr_schedule,
        drops=options.milestones,
    )


def _replica(task: Task, synchroniser: Synchroniser, meter: Meter, options: Options, rank: int) -> Replica:
    torch.manual_seed(derived_seed(options.seed, DROPOUT, rank))
    generator = torch.Generator().manual_seed(derived_seed(options.seed, AUGMENT, rank))
    carries = task if isinstance(task, Carries) else None
    return Replica(
        model=task.model,
        synchroniser=synchroniser,
        generator=generator,
        meter=meter,
        carries=carries,
        template=template_of(carries.state_dict()) if carries else {},
    )


def _begin(app: App, training: Training, device: torch.device, choice: str) -> int:
    """A new folder, or an old one to go on with; returns the first step. choice: see `settled`."""
    options, folder, comm = training.options, training.folder, training.comm
    with all_or_none(comm, advice=_advice(options)):
        if comm.rank == 0 and options.resume is None:
            config = {"app": app.module} | _config(training, device, choice)
            folder.begin(config, kept=_kept(training.task), overwrite=options.overwrite)
        elif comm.rank == 0:
            _require_possible(app, training)
    if options.resume is None:
        return 0
    own_flags = _own_flags(app, options.algorithm)
    steps = partial(steps_of, batches_of(training.task), options)
    step = resume(training.replica, folder, options, comm, steps_of=steps, own_flags=own_flags)
    if step is None:
        training.note(f"{folder.path} holds no checkpoint yet: starting from the beginning")
        return 0
    training.note(f"resumed {folder.path} at step {step}")
    return step


def _require_possible(app: App, training: Training) -> None:
    """RunError if the folder holds a run that is in the way, or none, or another one than is to go on."""
    options, folder = training.options, training.folder
    folder.prepare(resume=options.resume is not None, overwrite=options.overwrite)
    if options.resume is not None:
        own_flags = _own_flags(app, options.algorithm)
        require_same_run(folder, options, training.comm.size, own_flags=own_flags)
        folder.require_kept(_kept(training.task))


def _advice(options: Options) -> str:
    """On a full disk, until the folder holds a run: there is none to resume, unless this goes on with one."""
    return START_AGAIN if options.resume is None else GO_ON


def _kept(task: Task) -> dict[str, Any] | None:
    """For task.json, where there is something; RunError for what is not JSON."""
    if not isinstance(task, Keeps):
        return None
    kept = task.kept()
    if not isinstance(kept, dict):
        raise RunError(f"kept() gives a {type(kept).__name__}, expected a dict for JSON")
    try:
        json.dumps(kept, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RunError(f"kept() gives what is not JSON ({error}), expected texts, numbers, lists and dicts") from None
    return kept


def _config(training: Training, device: torch.device, choice: str) -> dict[str, object]:
    described = {
        "world_size": training.comm.size,
        "parameters": sum(parameter.numel() for parameter in training.task.model.parameters()),
        "hardware": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    return training.options.recorded() | described | ({"choice": choice} if choice else {})
