"""Going on with a run that was stopped, killed or finished: the same bits as if it had never stopped.

With another number of ranks only from an epoch's end, because from there on the samples are dealt out anew. What all
ranks share (parameters, and SGD's state) stays as it is; what was each rank's own is shared out by rule.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from communicators import Communicator

from thinwire_trainer.agreement import all_or_none, gather_texts
from thinwire_trainer.command_line.options import Options, Settings, endless
from thinwire_trainer.errors import DamagedError, RunError
from thinwire_trainer.records.checkpoint import Manifest, State, file_name, load, mean_of
from thinwire_trainer.records.run_folder import RunFolder
from thinwire_trainer.training.replica import Position, Replica, Totals, counted

StepsOf = Callable[[int], int]
LONGER = (
    "; --max-epochs is the length that the rate falls over: only a run that had --lr-schedule constant, or "
    "--milestones, from its start goes on beyond its end"
)

ADVICE = {
    "latest": "take the checkpoint before it with --resume previous",
    "previous": "start the run again with --overwrite",
}
OWN = ("generator", "torch_rng", "cuda_rng")


def resume(
    replica: Replica,
    folder: RunFolder,
    options: Options,
    comm: Communicator,
    *,
    steps_of: StepsOf,
    kept: dict[str, Any] | None = None,
) -> int | None:
    """Put `replica` and the metrics back to the checkpoint that --resume names, and return its step.

    replica: one that has taken no step. steps_of: number of ranks -> steps in an epoch. kept: content of task.json by
    now; other settings are named before other data.
    None if the run was stopped before its first checkpoint: it then starts from the beginning.
    AgreedError if the checkpoint is damaged, does not fit, or belongs to other settings or another number of ranks than
    --residuals allows, or the run has ended and kept none: the folder is then as it was, and the replica of no use.
    """
    which = options.resume or "latest"
    chosen = _agreed_choice(folder, which, comm)
    if chosen is None:
        with all_or_none(comm):
            if comm.rank == 0:
                _require_begun_alike(folder, options, comm.size)
                folder.require_kept(kept)
                folder.metrics.truncate(0)
        return None
    with all_or_none(comm), _advising(which):
        manifest = _same_run(chosen, options, comm.size)
        if comm.rank == 0:
            folder.require_kept(kept)
        resizes = options.residuals if options.elastic is None else len(manifest.files) != comm.size
        if resizes:
            state = _shared_out(chosen, manifest, replica, options, comm, steps_of)
        else:
            state = _read(chosen, manifest, comm.rank, options, steps_of(comm.size))
        if comm.rank == 0:
            folder.metrics.check(manifest.metrics_nbytes, manifest.metrics_sha256)
    with all_or_none(comm), _advising(which), _fitting(chosen / file_name(comm.rank % len(manifest.files))):
        replica.load_state_dict(state)
    with all_or_none(comm):
        if comm.rank == 0:
            folder.model.unlink(missing_ok=True)  # of an end that there is no longer
            folder.metrics.truncate(manifest.metrics_nbytes)
            folder.checkpoints.discard_after(chosen)
    return manifest.step


def _same_run(chosen: Path, options: Options, ranks: int) -> Manifest:
    manifest = Manifest.read(chosen)
    if options.elastic is None:
        _check_world(len(manifest.files), ranks, options.residuals)
    _require_settings(manifest.settings, options)
    return manifest


def _require_begun_alike(folder: RunFolder, options: Options, ranks: int) -> None:
    """RunError unless the run, which has no checkpoint, can start from the beginning as its config.json says."""
    if folder.model.exists():
        raise RunError(f"the run in {folder.path} has ended and kept no checkpoint: --overwrite begins anew")
    config = folder.recorded()
    begun = config.get("world_size", ranks)
    if options.elastic is None and begun != ranks:
        raise RunError(
            f"the run to resume has {begun!s:.40} ranks and no checkpoint yet, now there are {ranks}: start it with as "
            f"many, or begin anew with --overwrite"
        )
    _require_settings(config | {"elastic": config.get("elastic") is not None}, options)


def _require_settings(then: Settings, options: Options) -> None:
    if changed := options.changed(then):
        listed = "; ".join(
            f"--{name.replace('_', '-')} {then!s:.40} then, {now} now" for name, (then, now) in changed.items()
        )
        longer = not endless(then) and then.get("max_epochs") != options.max_epochs
        again = "give the same flags again" + LONGER * longer
        raise RunError(f"the run to resume has other settings ({listed}): {again}")


def _agreed_choice(folder: RunFolder, which: str, comm: Communicator) -> Path | None:
    """Rank 0's choice, because another machine may not see the newest entries of a shared folder at once."""
    name = ""
    with all_or_none(comm):
        if comm.rank == 0:
            chosen = folder.checkpoints.choose(which)
            name = chosen.name if chosen else ""
    name = gather_texts(name, comm)[0]
    return folder.checkpoints.path / name if name else None


def _shared_out(
    chosen: Path, manifest: Manifest, replica: Replica, options: Options, comm: Communicator, steps_of: StepsOf
) -> State:
    """This rank's state, out of those of another number of ranks, all of which every rank reads."""
    ranks = len(manifest.files)
    then, now = steps_of(ranks), steps_of(comm.size)
    states = [_read(chosen, manifest, rank, options, then) for rank in range(ranks)]
    if states[0]["position"]["step"]:
        raise RunError(
            f"the checkpoint is from the middle of an epoch, whose samples were dealt out to {ranks} ranks: take one "
            f"from an epoch's end (--resume previous may be one), or go on with --nworkers {ranks} until there is one"
        )
    with _fitting(chosen):
        return resized(states, replica, options, rank=comm.rank, step=manifest.step, per_epoch=(then, now))


def _read(chosen: Path, manifest: Manifest, rank: int, options: Options, steps_per_epoch: int) -> State:
    """The state that this rank saved, at the step that the manifest names; DamagedError for any other."""
    path = chosen / file_name(rank)
    with _fitting(path):
        state = load(chosen, manifest, rank)
        position = counted(Position, state["position"])
    if position.taken(steps_per_epoch) != manifest.step or position.step >= steps_per_epoch:
        raise DamagedError(f"{path} does not fit this run ({position} is not that of step {manifest.step})")
    if position.epoch > options.max_epochs:
        raise DamagedError(f"{path} has more epochs than --max-epochs {options.max_epochs} asks for")
    return state


def resized(
    states: Sequence[State], replica: Replica, options: Options, *, rank: int, step: int, per_epoch: tuple[int, int]
) -> State:
    """This rank's state, out of `states`: those of all ranks then, in rank order, at an epoch's end after `step` steps.

    per_epoch: steps in an epoch then, and now.
    Floating-point buffers are the means of those of all ranks, as evaluations have them; others are rank 0's. A rank
    that there was goes on with its random numbers, a further one begins with its own. What the task carries from batch
    to batch begins anew. The epoch's totals are empty.
    RunError where the synchroniser cannot.
    """
    fresh, epoch = replica.state_dict(), states[0]["position"]["epoch"]
    own = states[rank] if rank < len(states) else fresh
    parts = replica.synchroniser.resized(
        [replica.synchronised(state) for state in states],
        before=epoch * per_epoch[0],
        after=epoch * per_epoch[1],
        drop=options.residuals == "drop",
    )
    return {
        "model": _model([state["model"] for state in states], replica),
        **parts,
        **{name: fresh[name] for name in ("task",) if name in fresh},
        **{name: own[name] for name in OWN},
        "position": asdict(Position(epoch=epoch, since_epoch=epoch, since_step=step)),
        "totals": asdict(Totals()),
    }


def _model(models: Sequence[State], replica: Replica) -> State:
    """Rank 0's parameters, which are those of all, and mean buffers."""
    buffers = {name for name, buffer in replica.model.named_buffers() if buffer.is_floating_point()}
    return models[0] | mean_of(models, buffers & models[0].keys())


@contextmanager
def _advising(which: str) -> Iterator[None]:
    try:
        yield
    except DamagedError as error:
        raise RunError(f"{error}: {ADVICE[which]}") from None


@contextmanager
def _fitting(path: Path) -> Iterator[None]:
    """Raises DamagedError that names the file, for whatever torch and the libraries say of a state that they load."""
    try:
        yield
    except RunError:
        raise
    except Exception as error:
        raise DamagedError(f"{path} does not fit this run ({type(error).__name__}: {error!s:.500})") from None


def _check_world(ranks: int, size: int, residuals: str | None) -> None:
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
