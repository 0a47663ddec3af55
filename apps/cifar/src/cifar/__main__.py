"""`python -m cifar`: image classification; `--help` lists the flags."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from trainer.app import App
from trainer.command import main

from cifar.catalogue import DATASETS, ELSEWHERE, MODELS

if TYPE_CHECKING:
    import torch
    from trainer.command_line.options import Options

    from cifar.classification import Classification


def build(options: Options, device: torch.device) -> Classification:
    """The task; torch is imported only here, after the flags have been checked."""
    from cifar.classification import build

    return build(options, device)


APP = App(module="cifar", models=MODELS, datasets=DATASETS, build=build, elsewhere=ELSEWHERE, own_models=True)

if __name__ == "__main__":
    sys.exit(main(APP))
