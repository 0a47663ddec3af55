"""`python -m thinwire_text`: sentiment and language modelling; `--help` lists the flags."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from thinwire_trainer.app import App
from thinwire_trainer.command import main
from thinwire_trainer.synchronisers.table import lazily

from thinwire_text.catalogue import DATASETS, FLAGS, MODELS, REVIEWS, check

if TYPE_CHECKING:
    import torch
    from thinwire_trainer.app import Task
    from thinwire_trainer.command_line.options import Options


def build(options: Options, device: torch.device) -> Task:
    """The task; torch is imported only here, after the flags have been checked."""
    part = "sentiment" if options.dataset in REVIEWS else "language"
    task: Task = lazily(f"thinwire_text.{part}:build")(options, device)
    return task


APP = App(
    module="thinwire_text",
    models=MODELS,
    datasets=DATASETS,
    build=build,
    defaults={"lr": 8.0, "clip_norm": 0.25},  # README: How well it learns
    ignores=frozenset({"label_smoothing", "download"}),
    bundled={"pydoc": "reads no files"},
    flags=FLAGS,
    check=check,
    commands={"generate": "thinwire_text.generate:main", "classify": "thinwire_text.classify:main"},
)

if __name__ == "__main__":
    sys.exit(main(APP))
