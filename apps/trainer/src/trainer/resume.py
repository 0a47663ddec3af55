"""Going on with a run that was stopped, killed or finished: the same bits as if it had never stopped."""

from pathlib import Path

from communicators import Communicator

from trainer.agreement import gather_texts, together
from trainer.checkpoint import State, load
from trainer.errors import DamagedError, RunError
from trainer.manifest import Manifest
from trainer.options import Settings
from trainer.replica import Replica
from trainer.run_folder import RunFolder

ADVICE = {
    "latest": "take the checkpoint before it with --resume previous",
    "previous": "start the run again with --overwrite",
}


def resume(replica: Replica, folder: RunFolder, which: str, settings: Settings, comm: Communicator) -> int | None:
    """Put `replica` and the metrics back to the latest or previous checkpoint, and return its step.

    None if the run was stopped before its first checkpoint: it then starts from the beginning. AgreedError if the
    checkpoint is damaged, or belongs to other settings or another number of ranks.
    """
    chosen = _agreed_choice(folder, which, comm)
    if chosen is None:
        with together(comm):
            if comm.rank == 0:
                folder.metrics.truncate(0)
        return None
    with together(comm):
        manifest, state = _read(chosen, which, settings, comm)
    replica.load_state_dict(state)
    with together(comm):
        if comm.rank == 0:
            folder.metrics.truncate(manifest.metrics_nbytes)
            folder.checkpoints.discard_after(chosen)
    return manifest.step


def _agreed_choice(folder: RunFolder, which: str, comm: Communicator) -> Path | None:
    """Rank 0's choice, because another machine may not see the newest entries of a shared folder at once."""
    name = ""
    with together(comm):
        if comm.rank == 0:
            folder.require_run()
            chosen = folder.checkpoints.choose(which)
            name = chosen.name if chosen else ""
    name = gather_texts(name, comm)[0]
    return folder.checkpoints.path / name if name else None


def _read(chosen: Path, which: str, settings: Settings, comm: Communicator) -> tuple[Manifest, State]:
    try:
        manifest = Manifest.read(chosen)
        _check_world(manifest, comm.size)
        _check_settings(manifest.settings, settings)
        return manifest, load(chosen, manifest, comm.rank)
    except DamagedError as error:
        raise RunError(f"{error}: {ADVICE[which]}") from None


def _check_world(manifest: Manifest, size: int) -> None:
    if len(manifest.files) != size:
        raise RunError(
            f"the run to resume has {len(manifest.files)} ranks, now there are {size}: "
            f"start it with --nworkers {len(manifest.files)}"
        )


def _check_settings(then: Settings, now: Settings) -> None:
    changed = [
        f"--{name.replace('_', '-')} {then.get(name)} then, {now.get(name)} now"
        for name in then | now
        if then.get(name) != now.get(name)
    ]
    if changed:
        raise RunError(f"the run to resume has other settings ({'; '.join(changed)}): give the same flags again")
