"""Going on with a run that was stopped, killed or finished: the same bits as if it had never stopped."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path

from communicators import Communicator

from thinwire_trainer.all_or_none import all_or_none, gather_texts
from thinwire_trainer.command_line.options import Options, Settings, in_todays_terms
from thinwire_trainer.errors import AgreedError, DamagedError, RunError
from thinwire_trainer.records.checkpoint import State, load
from thinwire_trainer.records.manifest import Manifest, file_name
from thinwire_trainer.records.run_folder import RunFolder
from thinwire_trainer.resuming.fitting import fitted, fitted_rank
from thinwire_trainer.resuming.resizing import require_end_of_epoch, resized
from thinwire_trainer.training.replica import Replica

StepsOf = Callable[[int], int]
LONGER = (
    "; --max-epochs is the length that the rate falls over: only a run that had --lr-schedule constant, or "
    "--milestones, from its start goes on beyond its end"
)

ADVICE = {
    "latest": "take the checkpoint before it with --resume previous",
    "previous": "start the run again with --overwrite",
}


def resume(
    replica: Replica,
    folder: RunFolder,
    options: Options,
    comm: Communicator,
    *,
    steps_of: StepsOf,
    own_flags: Settings,
) -> int | None:
    """Put `replica` and the metrics back to the checkpoint that --resume names, and return its step.

    replica: one that has taken no step. steps_of: number of ranks -> steps in an epoch. own_flags: see
    `in_todays_terms`. None if the run was stopped before its first checkpoint: it then starts from
    the beginning. AgreedError if the checkpoint is damaged, does not fit, or belongs to other settings or another
    number of ranks than --residuals allows: the replica and the folder are then as they were.
    """
    which = options.resume or "latest"
    chosen = _agreed_choice(folder, which, comm)
    if chosen is None:
        _forget_metrics(folder, comm)
        return None
    with all_or_none(comm), _advising(which):
        manifest = _same_run(chosen, options, comm.size, own_flags)
        read = _read_all if options.residuals else _read
        path = chosen / file_name(comm.rank % len(manifest.files))
        state = read(chosen, manifest, replica, options, comm, steps_of)
        if comm.rank == 0:
            folder.metrics.check(manifest.metrics_nbytes, manifest.metrics_sha256)
    _load(replica, state, path, which, comm)
    with all_or_none(comm):
        if comm.rank == 0:
            folder.model.unlink(missing_ok=True)  # of an end that there is no longer
            folder.metrics.truncate(manifest.metrics_nbytes)
            folder.checkpoints.discard_after(chosen)
    return manifest.step


def require_same_run(folder: RunFolder, options: Options, ranks: int, *, own_flags: Settings) -> None:
    """RunError if the checkpoint that --resume names is damaged, or of other settings or another number of ranks.

    It only looks, by itself: before the folder is locked, which others may want meanwhile.
    """
    which = options.resume or "latest"
    chosen = folder.checkpoints.choose(which)
    if chosen is not None:
        with _advising(which):
            _same_run(chosen, options, ranks, own_flags)


def _same_run(chosen: Path, options: Options, ranks: int, own_flags: Settings) -> Manifest:
    manifest = Manifest.read(chosen)
    _check_world(manifest, ranks, options.residuals)
    _check_settings(in_todays_terms(manifest.settings, options.settings(), own_flags), options.settings())
    return manifest


def _forget_metrics(folder: RunFolder, comm: Communicator) -> None:
    with all_or_none(comm):
        if comm.rank == 0:
            folder.metrics.check(0, None)
            folder.metrics.truncate(0)


def _agreed_choice(folder: RunFolder, which: str, comm: Communicator) -> Path | None:
    """Rank 0's choice, because another machine may not see the newest entries of a shared folder at once."""
    name = ""
    with all_or_none(comm):
        if comm.rank == 0:
            chosen = folder.checkpoints.choose(which)
            name = chosen.name if chosen else ""
    name = gather_texts(name, comm)[0]
    return folder.checkpoints.path / name if name else None


def _read(
    chosen: Path, manifest: Manifest, replica: Replica, options: Options, comm: Communicator, steps_of: StepsOf
) -> State:
    """This rank's state."""
    state = load(chosen, manifest, comm.rank)
    with _naming(chosen / file_name(comm.rank)):
        return fitted(state, replica, options, step=manifest.step, steps_per_epoch=steps_of(comm.size))


def _read_all(
    chosen: Path, manifest: Manifest, replica: Replica, options: Options, comm: Communicator, steps_of: StepsOf
) -> State:
    """This rank's state, out of those of another number of ranks, all of which every rank reads."""
    ranks, states = len(manifest.files), []
    then, now = steps_of(ranks), steps_of(comm.size)
    for rank in range(ranks):
        state = load(chosen, manifest, rank)
        with _naming(chosen / file_name(rank)):
            states.append(fitted_rank(state, replica, options, step=manifest.step, steps_per_epoch=then))
        require_end_of_epoch(states[rank], ranks)
    with _naming(chosen):
        return resized(states, replica, options, rank=comm.rank, step=manifest.step, per_epoch=(then, now))


def _load(replica: Replica, state: State, path: Path, which: str, comm: Communicator) -> None:
    """All ranks load, or none: what one of them cannot take after all is undone on all."""
    before = deepcopy(replica.state_dict())
    try:
        with all_or_none(comm), _advising(which), _naming(path):
            try:
                replica.load_state_dict(state)
            except Exception as error:
                raise DamagedError(f"{type(error).__name__}: {error}") from None
    except AgreedError:
        replica.load_state_dict(before)
        raise


@contextmanager
def _advising(which: str) -> Iterator[None]:
    try:
        yield
    except DamagedError as error:
        raise RunError(f"{error}: {ADVICE[which]}") from None


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except DamagedError as error:
        raise DamagedError(f"{path} does not fit this run ({error})") from None


def _check_world(manifest: Manifest, size: int, residuals: str | None) -> None:
    ranks = len(manifest.files)
    if residuals and ranks == size:
        raise RunError(
            f"--residuals {residuals} is for another number of ranks than the run to resume has, which is {ranks}, "
            f"as now: leave it out"
        )
    if not residuals and ranks != size:
        raise RunError(
            f"the run to resume has {ranks} ranks, now there are {size}: start it with --nworkers {ranks}, or say what "
            f"becomes of what each rank has not sent yet: --residuals carry or drop"
        )


def _check_settings(then: Settings, now: Settings) -> None:
    changed = [
        f"--{name.replace('_', '-')} {then.get(name)!s:.40} then, {now.get(name)} now"
        for name in then | now
        if then.get(name) != now.get(name)
    ]
    if changed:
        again = "give the same flags again" + LONGER * (then.get("max_epochs") != now.get("max_epochs"))
        raise RunError(f"the run to resume has other settings ({'; '.join(changed)}): {again}")
