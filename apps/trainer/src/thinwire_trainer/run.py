"""One rank's whole run: from checked options to the trained model."""

import json
import platform
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from communicators import Communicator, Elastic

from thinwire_trainer.agreement import (
    AgreedStop,
    ControlCommunicator,
    Meter,
    all_or_none,
    gather_texts,
    require_same,
    require_same_data,
)
from thinwire_trainer.app import App, Carries, Keeps, LeavesOut, Task
from thinwire_trainer.command_line.flags import table_of
from thinwire_trainer.command_line.options import Options
from thinwire_trainer.errors import GO_ON, START_AGAIN, RunError
from thinwire_trainer.launching.device import clock_of
from thinwire_trainer.launching.ending import StopRequest
from thinwire_trainer.records.durable import write_tensors
from thinwire_trainer.records.folder_lock import locked
from thinwire_trainer.records.live import clear, published
from thinwire_trainer.records.metrics import Events, TrainingProgress
from thinwire_trainer.records.run_folder import NONE_TO_JOIN, RunFolder
from thinwire_trainer.records.trace import Trace
from thinwire_trainer.resuming import resume
from thinwire_trainer.synchronisers.automatic import settled
from thinwire_trainer.synchronisers.synchroniser import Synchroniser
from thinwire_trainer.synchronisers.table import AUTO
from thinwire_trainer.training.batches import (
    AUGMENT,
    DROPOUT,
    agreed_steps,
    batches_of,
    derived_seed,
    steps_dealt,
    steps_of,
)
from thinwire_trainer.training.elastic import Course, train_elastic
from thinwire_trainer.training.learning_rate import rate_schedule
from thinwire_trainer.training.loop import Training, train
from thinwire_trainer.training.phases import Phases, stopwatch_of
from thinwire_trainer.training.preparation import autocast, compile_forward, make_dense
from thinwire_trainer.training.replica import ModelGenerator, Replica, schema_of

CPU = torch.device("cpu")
Trains = Callable[[Training], None]


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
    early = _built(app, options, device) if comm.elastic else None  # others would wait for who comes in with nothing
    aside, choice = ControlCommunicator(comm), ""
    require_same(options.alike(), aside)
    trains: Trains = train
    if isinstance(comm, Elastic):
        if not any(gather_texts("there" * RunFolder(options.output).config.exists(), aside)):
            options = replace(options, resume=None)  # so one command begins, and goes on after all have died
        comm.carry(course := Course(options))
        trains = partial(train_elastic, world=comm, course=course)
    with all_or_none(aside):
        task, casting = early or _built(app, options, device)
    if options.algorithm == AUTO:
        options, choice = settled(options, task.model, comm, table_of(app))
    steps = steps_dealt(task, options) if comm.elastic else agreed_steps(batches_of(task), options, aside)
    make = table_of(app)[options.algorithm].make
    rates = partial(rate_schedule, options=options, steps_per_epoch=steps)
    with closing(make(options, task.model, comm, rates)) as synchroniser:
        meter = Meter(comm, aside)
        with all_or_none(aside):
            replica = _replica(task, synchroniser, meter, options, comm)
        training = Training(
            task=task,
            replica=replica,
            comm=aside,
            options=options,
            steps_per_epoch=steps,
            folder=RunFolder(options.output, options.keep),
            progress=TrainingProgress(
                options.algorithm, epochs=options.max_epochs, steps_per_epoch=steps, quiet=comm.rank != 0
            ),
            clock=clock_of(device),
            phases=Phases(stopwatch_of(device)),
            autocast=casting,
        )
        _in_its_folder(app, training, trains, request, device, choice)


def _built(
    app: App, options: Options, device: torch.device
) -> tuple[Task, Callable[[], AbstractContextManager[object]]]:
    """The task, and contexts of its forwards."""
    with ModelGenerator(options.seed):  # the model starts alike on all ranks
        task = app.build(options, device)
    make_dense(task.model)
    compile_forward(task.model, options, device)
    return task, autocast(options, device)


def _in_its_folder(
    app: App, training: Training, trains: Trains, request: StopRequest | None, device: torch.device, choice: str
) -> None:
    """The run, once there is a place for it. choice: the algorithm and why, where it was measured."""
    options, comm, advice = training.options, training.comm, _advice(training.options)

    def prepare() -> None:
        if comm.joining:
            training.folder.require_run(NONE_TO_JOIN)
        elif comm.rank == 0:
            training.folder.prepare(resume=options.resume is not None)

    with training.progress, locked(options.output, comm, prepare=prepare, advice=advice):
        _begin(app, training, device, choice)
        chosen = f"{choice} (when the run began)" if choice and options.resume else choice
        left_out = training.task.faults.told() if isinstance(training.task, LeavesOut) else ""
        late = options.not_reached(options.max_epochs * training.steps_per_epoch)
        for note in filter(None, (chosen, *late, left_out)):
            training.note(note)
        with _traced(training), _stopped_by(request, training), _published(training):
            with all_or_none(comm):
                if options.tensorboard and comm.rank == 0:
                    training.events = Events(training.folder.events, first_step=training.steps)
            trains(training)
        comm.atomic(partial(_end, training))


@contextmanager
def _stopped_by(request: StopRequest | None, training: Training) -> Iterator[None]:
    """Let the loop answer a signal in the block, unless no checkpoint is wanted."""
    if request is None or training.options.checkpoint_every == 0:
        yield
        return
    with request.deferred():
        synchroniser = training.replica.synchroniser
        meet = synchroniser.settle if synchroniser.by_rounds else None
        training.stop = AgreedStop(training.comm, lambda: request.number, first_step=training.steps, meet=meet)
        yield


@contextmanager
def _published(training: Training) -> Iterator[None]:
    """Publish statistics in the block, where asked for."""
    options, folder = training.options, training.folder
    with ExitStack() as stack:
        with all_or_none(training.comm):
            if training.comm.rank == 0 and not training.comm.joining:
                clear(folder.live)
        with all_or_none(training.comm):
            publishing = published(options.metrics, training.stats, folder, training.progress)
            training.publish = stack.enter_context(publishing)
        yield


@contextmanager
def _traced(training: Training) -> Iterator[None]:
    """Record a trace of some steps in the block, where asked for."""
    if not training.options.profile:
        yield
        return
    comm = training.comm
    with closing(Trace(training.folder.trace, records=not comm.joining, writes=comm.rank == 0)) as training.trace:
        yield


def _end(training: Training) -> None:
    """The model, and what the user should know."""
    with training.replica.synchroniser.averaged_model(training.comm), all_or_none(training.comm):
        if training.comm.rank == 0:
            write_tensors(training.folder.model, training.task.model.state_dict())
    if remark := training.replica.synchroniser.remark(training.steps):
        training.note(remark)
    training.note(f"{training.options.algorithm}: metrics and model in {training.options.output}")


def _replica(task: Task, synchroniser: Synchroniser, meter: Meter, options: Options, comm: Communicator) -> Replica:
    place = comm.rank + ((comm.generation - 1) << 20)  # a newcomer has random numbers of its own
    model_generator = ModelGenerator(derived_seed(options.seed, DROPOUT, place))
    generator = torch.Generator().manual_seed(derived_seed(options.seed, AUGMENT, place))
    carries = task if isinstance(task, Carries) else None
    template = schema_of(carries.state_dict()) if carries else {}
    return Replica(task.model, synchroniser, generator, model_generator, meter, carries, template)


def _begin(app: App, training: Training, device: torch.device, choice: str) -> None:
    """A new folder, or an old one to go on with; whoever is rank 0 after a death does again what that one began.

    What it has written is no run that is in the way: before anything is written, all know that there was none.
    """
    options, folder, comm = training.options, training.folder, training.comm
    new = options.resume is None and not comm.joining

    def require_empty() -> None:
        with all_or_none(comm):
            if comm.rank == 0 and new and not options.overwrite:
                folder.require_empty()

    def begin() -> None:
        with all_or_none(comm, advice=_advice(options)):
            if comm.rank == 0 and new:
                config = {"app": app.module} | _config(training, device, choice)
                folder.begin(config, kept=kept, overwrite=options.overwrite)

    comm.atomic(require_empty)
    with all_or_none(comm):
        kept = None if comm.joining and comm.rank else _kept(training.task)  # others wait for who joins
    require_same_data(kept, comm)
    comm.atomic(begin)
    if options.resume is None or comm.joining:
        return
    steps = partial(steps_of, batches_of(training.task), options)
    if comm.elastic:
        steps = partial(lambda per_epoch, size: per_epoch, training.steps_per_epoch)
    step = comm.atomic(partial(resume, training.replica, folder, options, comm, steps_of=steps, kept=kept))
    none_yet = f"{folder.path} holds no checkpoint yet: starting from the beginning"
    training.note(none_yet if step is None else f"resumed {folder.path} at step {step}")


def _advice(options: Options) -> str:
    """Choose the advice for a full disk: until the folder holds a run there is none to resume."""
    return START_AGAIN if options.resume is None else GO_ON


def _kept(task: Task) -> dict[str, Any] | None:
    """Content of task.json, where there is some; RunError for what is not JSON."""
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
    made: dict[str, object] = {"choice": choice} if choice else {}
    made |= {"compared": True} if training.options.compared else {}
    return training.options.recorded() | described | made
