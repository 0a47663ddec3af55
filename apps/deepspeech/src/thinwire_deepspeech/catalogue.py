"""The app's models, data sets and flags by name. Models and data are imported only when they are used."""

from thinwire_trainer.command_line import quantities
from thinwire_trainer.command_line.flag import Flag

# (**fields of thinwire_deepspeech.model.deepspeech2.Size that differ) -> Size
MODELS = {
    "small": "thinwire_deepspeech.model.sizes:small",
    "lstman4": "thinwire_deepspeech.model.sizes:lstman4",
    "deepspeech2": "thinwire_deepspeech.model.sizes:deepspeech2",
}

# (data_dir, *, faults) -> thinwire_deepspeech.data.utterances.Corpus
DATASETS = {
    "spoken-digits": "thinwire_deepspeech.data.spoken_digits:load",
    "an4": "thinwire_deepspeech.data.an4:load",
    "librispeech": "thinwire_deepspeech.data.librispeech:load",
    "manifest": "thinwire_deepspeech.data.manifest:load",
}

FLAGS = (
    Flag(name="rnn", default=None, choices=("lstm", "gru", "rnn"), says="cells, where not those of --dnn"),
    Flag(name="hidden", default=None, read=quantities.count, metavar="N", says="their number in a layer, likewise"),
    Flag(name="layers", default=None, read=quantities.count, metavar="N", says="recurrent layers, likewise"),
    Flag(name="directions", default=None, choices=("both", "forwards"), says="in which they hear, likewise"),
    Flag(name="bucketing", default=True, says="batches of like length, so that ranks have like work"),
    Flag(name="spec_augment", default=False, says="blot out stripes of time and frequency in training"),
    Flag(
        name="skip_bad",
        default=False,
        says="leave out utterances that cannot be used, tell of the first ones, and count them",
    ),
)

ELSEWHERE = dict.fromkeys(("lstm", "lstmimdb"), "python -m thinwire_text (sentiment and language modelling)")
