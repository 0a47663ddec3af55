"""`python -m thinwire_cifar`: image classification; `--help` lists the flags."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from thinwire_trainer.app import App
from thinwire_trainer.command import main
from thinwire_trainer.command_line.options import DATA_DIR
from thinwire_trainer.errors import RunError
from thinwire_trainer.synchronisers.table import lazily

from thinwire_cifar.catalogue import DATASETS, ELSEWHERE, MODELS

if TYPE_CHECKING:
    from thinwire_trainer.command_line.options import Options


def check(options: Options) -> None:
    """RunError for what has no effect."""
    if options.dataset == "digits" and (options.download or options.data_dir != DATA_DIR):
        flag = "--download" if options.download else f"--data-dir {options.data_dir}"
        raise RunError(f"{flag} has no effect on digits, which come with scikit-learn: leave it out")


APP = App(
    module="thinwire_cifar",
    models=MODELS,
    datasets=DATASETS,
    build=lazily("thinwire_cifar.classification:build"),
    elsewhere=ELSEWHERE,
    own_models=True,
    check=check,
)

if __name__ == "__main__":
    sys.exit(main(APP))
