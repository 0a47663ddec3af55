"""The app's models, data sets and flags by name. Models and data are imported only when they are used."""

from thinwire_trainer.command_line import quantities
from thinwire_trainer.command_line.flag import Flag

# (**fields of thinwire_deepspeech.model.Size that differ) -> Size
MODELS = {
    "small": "thinwire_deepspeech.model:small",
    "lstman4": "thinwire_deepspeech.model:lstman4",
    "deepspeech2": "thinwire_deepspeech.model:deepspeech2",
}

# (data_dir, *, faults) -> thinwire_deepspeech.data.utterances.Corpus
DATASETS = {
    "spoken-digits": "thinwire_deepspeech.data.spoken_digits:load",
    "an4": "thinwire_deepspeech.data.an4:load",
    "librispeech": "thinwire_deepspeech.data.librispeech:load",
    "manifest": "thinwire_deepspeech.data.manifest:load",
}

FLAGS = (
    Flag("rnn", None, "cells, where not those of --dnn", choices=("lstm", "gru", "rnn")),
    Flag("hidden", None, "their number in a layer, likewise", read=quantities.count, metavar="N"),
    Flag("layers", None, "recurrent layers, likewise", read=quantities.count, metavar="N"),
    Flag("directions", None, "in which they hear, likewise", choices=("both", "forwards")),
    Flag("bucketing", True, "batches of like length, so that ranks have like work"),
    Flag("spec_augment", False, "blot out stripes of time and frequency in training"),
    Flag("skip_bad", False, "leave out utterances that cannot be used, tell of the first ones, and count them"),
)

ELSEWHERE = dict.fromkeys(("lstm", "lstmimdb"), "python -m thinwire_text (sentiment and language modelling)")
