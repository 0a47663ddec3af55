"""`python -m thinwire_deepspeech`: speech recognition; `--help` lists the flags."""

import sys

from thinwire_trainer.app import App
from thinwire_trainer.command import main
from thinwire_trainer.command_line.options import Options
from thinwire_trainer.errors import RunError
from thinwire_trainer.synchronisers.table import lazily

from thinwire_deepspeech.catalogue import DATASETS, ELSEWHERE, FLAGS, MODELS


def check(options: Options) -> None:
    """RunError for what has no effect."""
    if options.app["skip_bad"] and options.dataset == "spoken-digits":
        raise RunError("--skip-bad has no effect on spoken-digits, which are made where they are damaged: leave it out")


APP = App(
    module="thinwire_deepspeech",
    models=MODELS,
    datasets=DATASETS,
    build=lazily("thinwire_deepspeech.recognition:build"),
    defaults={"batch_size": 8, "lr": 0.01, "clip_norm": 20.0, "warmup_epochs": 1.0, "max_epochs": 8},
    ignores=frozenset({"label_smoothing", "download", "elastic", "at_least"}),  # batches are of fixed ranks
    elsewhere=ELSEWHERE,
    flags=FLAGS,
    check=check,
    commands={"transcribe": "thinwire_deepspeech.transcribe:main"},
)

if __name__ == "__main__":
    sys.exit(main(APP))
