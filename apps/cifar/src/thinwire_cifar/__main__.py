"""`python -m thinwire_cifar`: image classification; `--help` lists the flags."""

import sys

from thinwire_trainer.app import App
from thinwire_trainer.command import main
from thinwire_trainer.synchronisers.table import lazily

from thinwire_cifar.catalogue import DATASETS, ELSEWHERE, MODELS

APP = App(
    module="thinwire_cifar",
    models=MODELS,
    datasets=DATASETS,
    build=lazily("thinwire_cifar.classification:build"),
    elsewhere=ELSEWHERE,
    own_models=True,
    bundled={"digits": "come with scikit-learn"},
)

if __name__ == "__main__":
    sys.exit(main(APP))
