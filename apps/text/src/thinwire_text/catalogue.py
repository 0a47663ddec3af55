"""The app's models, data sets and flags by name. Models and data are imported only when they are used."""

from thinwire_trainer.command_line import quantities
from thinwire_trainer.command_line.flag import Flag
from thinwire_trainer.command_line.options import READERS, Options
from thinwire_trainer.errors import RunError

# (words, *, window, layers, hidden, dropout, tied) -> text.models.language.Language
LANGUAGE = {
    "lstm-small": "thinwire_text.models.lstm:lstm_small",
    "transformer-small": "thinwire_text.models.transformer:transformer_small",
    "lstm": "thinwire_text.models.lstm:lstm",
    "transformer": "thinwire_text.models.transformer:transformer",
}
TRANSFORMERS, UNITS_A_HEAD = ("transformer-small", "transformer"), 32
# (words, *, layers, hidden, dropout) -> nn.Module
SENTIMENT = {"lstmimdb": "thinwire_text.models.lstmimdb:lstmimdb"}

# (data_dir, *, held_out, faults) -> text.data.corpus.Corpus
CORPORA = {"pydoc": "thinwire_text.data.pydoc:load", "ptb": "thinwire_text.data.ptb:load"}
# (data_dir, *, length, most, faults) -> text.data.imdb.Reviews
REVIEWS = {"imdb": "thinwire_text.data.imdb:load"}

MODELS, DATASETS = LANGUAGE | SENTIMENT, CORPORA | REVIEWS

FOR_ALL = (
    Flag("layers", None, "instead of the model's own number", read=quantities.count, metavar="L"),
    Flag("hidden", None, "units a layer, instead of its own", read=quantities.count, metavar="H"),
    Flag("dropout", None, "instead of the model's own", read=quantities.dropout, metavar="P"),
    Flag("skip_bad", False, "leave out lines or files that cannot be used, tell of the first ones, and count them"),
)
FOR_LANGUAGE = (
    Flag("window", 35, "tokens of a stream in a step", read=quantities.count, metavar="T"),
    Flag("tied", False, "the output's weights are the embedding's"),
    Flag("held_out", "test", "which of ptb's files the metrics are of", choices=("test", "valid")),
)
FOR_SENTIMENT = (
    Flag("length", 400, "tokens of a review, from its beginning", read=quantities.count, metavar="T"),
    Flag("vocabulary", 50_000, "most frequent words of reviews", read=quantities.count, metavar="N"),
)
FLAGS = (*FOR_ALL, *FOR_LANGUAGE, *FOR_SENTIMENT)


def check(options: Options) -> None:
    """RunError where model, data set and flags do not fit together."""
    language, reviews = options.dnn in LANGUAGE, options.dataset in REVIEWS
    if options.dnn in TRANSFORMERS and (hidden := options.app["hidden"]) and hidden % UNITS_A_HEAD:
        raise RunError(f"--hidden {hidden} is no multiple of {UNITS_A_HEAD}, the units of an attention head")
    if language and reviews:
        raise RunError(f"--dataset {options.dataset} is for --dnn {', '.join(SENTIMENT)}, not {options.dnn}")
    if not language and not reviews:
        raise RunError(f"--dnn {options.dnn} is for --dataset {', '.join(REVIEWS)}, not {options.dataset}")
    for flag in FOR_SENTIMENT if language else FOR_LANGUAGE:
        if options.app[flag.name] != flag.default:
            raise RunError(f"--{flag.name.replace('_', '-')} has no effect on {options.dnn}: leave it out")
    if options.dataset == "pydoc" and options.app["skip_bad"]:
        raise RunError("--skip-bad has no effect on pydoc, which reads no files: leave it out")
    if language and options.elastic is not None:
        raise RunError(f"--elastic is not for {options.dnn}, whose streams are dealt once: leave it out")
    if language and options.readers != READERS:
        raise RunError(
            f"--readers {options.readers} has no effect on {options.dnn}, whose text is in memory: leave it out"
        )
    if options.app["held_out"] != "test" and options.dataset != "ptb":
        raise RunError(f"--held-out {options.app['held_out']} is for ptb, whose parts are files: leave it out")
