"""The model that a run has trained, for the app's own commands (`App.commands`)."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import torch
from torch import nn

from thinwire_trainer.app import App
from thinwire_trainer.command_line.flags import parse
from thinwire_trainer.command_line.options import Options
from thinwire_trainer.errors import DamagedError, RunError
from thinwire_trainer.records.checkpoint import Manifest, load, mean_of
from thinwire_trainer.records.durable import opened, unsealed
from thinwire_trainer.records.run_folder import RunFolder


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Result of a run.

    options: those that it began with, as its config.json has them. weights: the model's state_dict. source: the file or
    checkpoint that they are from.
    """

    options: Options
    weights: Mapping[str, Any]
    source: Path
    folder: RunFolder

    @cached_property
    def kept(self) -> Mapping[str, Any]:
        """Content of task.json (`app.Keeps`); RunError where the run has no such file, or it is damaged."""
        if not os.path.lexists(self.folder.task):
            raise RunError(
                f"{self.folder.task} is missing, which a command needs besides the model: copy it from the run, too"
            )
        return unsealed(self.folder.task)

    def into(self, model: nn.Module) -> nn.Module:
        """The model with these weights, for evaluation; RunError where they are another model's."""
        try:
            model.load_state_dict(dict(self.weights))
        except RuntimeError as error:
            raise RunError(f"{self.source} does not fit the model that config.json names ({error})") from None
        return model.eval()


def trained(app: App, path: Path) -> Trained:
    """Result of the run in this folder; RunError where there is none, it is another app's, or it is damaged.

    Of a run that has ended: model.pt, which is what its last evaluation saw. Of one that has not: the mean of its
    ranks' models in the newest checkpoint. That is what evaluations see, but for algorithms that evaluate an anchor
    (easgd, overlap-local-sgd, diloco …): theirs is then the mean of ranks that are on their way.
    """
    folder = RunFolder(path)
    recorded = folder.recorded(wanted="no run: give the folder that --output named")
    if (other := recorded.get("app", app.module)) != app.module:
        raise RunError(f"{path} holds a run of {other!s:.40}, not of {app.module}: python -m {other!s:.40}")
    elastic = recorded.get("elastic") is not None  # then the ranks do not count
    try:  # as anything that only training needs, what wrote the run's events may be missing here
        argv = [f"--config={folder.config}", "--no-tensorboard", *["--elastic"] * elastic]
        options = parse(argv, app, world_size=1 if elastic else None)
    except RunError as error:
        raise RunError(f"{path} holds no run that this {app.module} could have made: {error}") from None
    if os.path.lexists(folder.model):
        return Trained(options=options, weights=_read(folder.model), source=folder.model, folder=folder)
    newest = folder.checkpoints.choose("latest")
    if newest is None:
        raise RunError(f"{path} holds no model yet: the run was stopped before its first checkpoint")
    return Trained(options=options, weights=_mean(newest), source=newest, folder=folder)


def _read(path: Path) -> dict[str, Any]:
    """The state_dict; its archive has a checksum of each part. OSError for a file that may not be opened."""
    with opened(path) as file:
        try:
            if ZipFile(file).testzip() is not None:  # torch looks at none of its archive's checksums
                raise DamagedError("a checksum")
            file.seek(0)
            state: object = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # whatever a file that somebody else has made brings about
            raise DamagedError(f"{path} is damaged ({type(error).__name__})") from None
    if not isinstance(state, dict):
        raise DamagedError(f"{path} is damaged: it holds no state_dict")
    return state


def _mean(checkpoint: Path) -> dict[str, Any]:
    """Model of a checkpoint: floating-point tensors are means over ranks, others rank 0's."""
    manifest = Manifest.read(checkpoint)
    models = [load(checkpoint, manifest, rank)["model"] for rank in range(len(manifest.files))]
    averaged = [name for name, value in models[0].items() if value.is_floating_point()]
    model: dict[str, Any] = models[0] | mean_of(models, averaged)
    return model
