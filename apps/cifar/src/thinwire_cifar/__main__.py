"""`python -m thinwire_cifar`: image classification; `--help` lists the flags."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from thinwire_trainer.app import App
from thinwire_trainer.command import main

from thinwire_cifar.catalogue import DATASETS, ELSEWHERE, MODELS

if TYPE_CHECKING:
    import torch
    from thinwire_trainer.command_line.options import Options

    from thinwire_cifar.classification import Classification


def build(options: Options, device: torch.device) -> Classification:
    """The task; torch is imported only here, after the flags have been checked."""
    from thinwire_cifar.classification import build

    return build(options, device)


APP = App(module="thinwire_cifar", models=MODELS, datasets=DATASETS, build=build, elsewhere=ELSEWHERE, own_models=True)

if __name__ == "__main__":
    sys.exit(main(APP))
