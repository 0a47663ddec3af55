"""The parser of the command line that all apps share: every flag, in groups that `--help` shows."""

import re
from argparse import SUPPRESS, ArgumentParser, ArgumentTypeError, BooleanOptionalAction
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from thinwire_trainer.app import App
from thinwire_trainer.command_line import quantities
from thinwire_trainer.command_line.config_file import RECORDED
from thinwire_trainer.command_line.flag import Flag
from thinwire_trainer.command_line.options import DATA_DIR, KEEP, READERS, Options
from thinwire_trainer.errors import UsageError
from thinwire_trainer.synchronisers.table import AUTO, OPTIMIZERS, Entry, owners
from thinwire_trainer.training.learning_rate import SHAPES

DEFAULT = "dense"
COMPRESSED = "gtopk"  # by --compression without --compressor
SCHEDULE, MILESTONED = "cosine", "step"
ADAMW_RATE = 0.001
ADAMW_MOMENTUM, ADAMW_MOMENTUM_WAITING, MUON_MOMENTUM = 0.9, 0.5, 0.95
"""β₁, and that where updates wait to be sent, which does a part of momentum's work; Muon's μ."""

TASK = (
    Flag("data_dir", DATA_DIR, "where its files are", read=Path, metavar="DIR"),
    Flag("readers", READERS, "threads that read ahead", read=quantities.count_or_zero, metavar="N"),
    Flag(
        "config",
        None,
        "settings from a run's config.json, or a file like it; a flag given here wins",
        read=Path,
        metavar="FILE",
    ),
)
OPTIMISATION = (
    Flag("batch_size", 32, "samples per rank and step", read=quantities.count, metavar="B"),
    Flag(
        "optimizer",
        OPTIMIZERS[0],
        "of each rank; muon: Muon for hidden matrices, AdamW for the rest",
        choices=OPTIMIZERS,
    ),
    Flag(
        "lr",
        0.1,
        f"peak learning rate (default: %(default)g; adamw, muon, demo: {ADAMW_RATE})",
        read=quantities.positive,
    ),
    Flag(
        "momentum",
        0.9,
        "of SGD, sparse: before selection, as in DGC; of adamw β1 (default: %(default)g; adamw, sparse or eager: "
        f"{ADAMW_MOMENTUM_WAITING:g}; muon: {MUON_MOMENTUM}; demo: 0)",
        read=quantities.momentum,
    ),
    Flag("nesterov", False, "Nesterov's momentum, default of eager-* with SGD; not of sparse gradients"),
    Flag("weight_decay", 0.0, "pull of the parameters towards 0", read=quantities.non_negative, metavar="W"),
    Flag(
        "clip_norm",
        None,
        "clip each rank's gradient before it is exchanged, so that the norm of the mean is held to about this "
        "(default: %(default)s)",
        read=quantities.positive,
        metavar="C",
    ),
    Flag("label_smoothing", 0.0, "of a classifier", read=quantities.smoothing, metavar="S"),
    Flag("max_epochs", 20, "length of the run", read=quantities.count, metavar="E"),
    Flag("warmup_epochs", 0.0, "of the rate", read=quantities.non_negative, metavar="E"),
    Flag("lr_schedule", None, f"default: {SCHEDULE}, with --milestones {MILESTONED}", choices=tuple(SHAPES)),
    Flag(
        "milestones",
        None,
        "epochs after which the rate is a tenth of what it was (default: 1/2 and 3/4 of the run)",
        read=quantities.count,
        metavar="E",
        several=True,
    ),
    Flag("seed", 0, "of all random numbers", read=quantities.seed),
)
MACHINE = (
    Flag("nworkers", None, "ranks; without a launcher this many are started", read=quantities.count, metavar="N"),
    Flag("at_least", None, "elastic ranks that train, else they wait (default: 1)", read=quantities.count, metavar="N"),
    Flag("device", "auto", "auto: a GPU of its own for each local rank, if there is", choices=("auto", "cpu", "cuda")),
    Flag("backend", "gloo", "between ranks without MPI; nccl: GPUs", choices=("gloo", "nccl")),
    Flag("amp", False, "forward passes of training in bfloat16 (autocast)"),
    Flag("compile", False, "the model by torch.compile"),
)
RUN = (
    Flag("output", None, "metrics, checkpoints, model (default: runs/APP-DNN-DATASET-ALGO)", read=Path, metavar="DIR"),
    Flag(
        "residuals",
        None,
        "of a run that is resumed with another number of ranks: shared out among them, or left behind",
        choices=("carry", "drop"),
    ),
    Flag(
        "checkpoint_every",
        None,
        "0: never (default: at the end of each epoch)",
        read=quantities.count_or_zero,
        metavar="STEPS",
    ),
    Flag("keep", None, f"checkpoints, the newest (default: {KEEP})", read=quantities.count, metavar="N"),
    Flag("tensorboard", False, "also write TensorBoard events"),
    Flag(
        "metrics",
        None,
        "statistics of the run under way: prometheus[:PORT] serves them to Prometheus, each local rank on the port "
        "after the last one's (default 9464); otlp[:URL] sends them to a collector of OpenTelemetry; file keeps them "
        "in DIR/live, for `thinwire top DIR`",
        read=quantities.metrics_place,
        metavar="WHERE",
    ),
    Flag("profile", False, "also write a trace of a few steps of all ranks, for Perfetto or chrome://tracing"),
)
OVERLAP = Flag("overlap", False, "gradients travel while backward computes others")
COMMON = (*TASK, OVERLAP, *OPTIMISATION, *MACHINE, *RUN)


class Parser(ArgumentParser):
    """An `ArgumentParser` that leaves printing and exiting to the caller: with many ranks only one speaks."""

    def error(self, message: str) -> NoReturn:
        """Raises UsageError."""
        hint = f"(python -m {self.prog} --help lists all flags)"
        raise UsageError(message if message.endswith(hint) else f"{message} {hint}")


def parser_of(app: App, table: Mapping[str, Entry]) -> ArgumentParser:
    """Every flag of this app. Those of single algorithms have no defaults, to tell what was given.

    The help takes a default from the flag itself, %(default)s, because the app may have another than is written here.
    UsageError where a name of the app's own flags is taken.
    """
    parser = Parser(
        prog=app.module,
        usage="python -m %(prog)s [--algorithm NAME] [flags]",
        description="Trains a model on this many ranks; metrics, checkpoints and the model go to --output.",
        epilog=_commands_help(app),
        allow_abbrev=False,
    )
    _add_task(parser, app)
    of_the_app = parser.add_argument_group(f"{app.module}'s own") if app.flags else None
    _add_synchronisation(parser, table)
    _add(parser.add_argument_group("optimisation"), OPTIMISATION)
    machine, run = parser.add_argument_group("machine"), parser.add_argument_group("run")
    _add(machine, MACHINE)
    elastic = (
        "train with every process that is started with this command, at any time: they meet at HOST:PORT of `python -m "
        "communicators.elastic`, by default in the Store of torchrun's agent. --batch-size is then of all ranks "
        "together. A rank that the others left out, because it was stopped or cut off, ends with code 1: start it again"
    )
    machine.add_argument("--elastic", nargs="?", const="", type=meeting, metavar="HOST:PORT", help=elastic)
    machine.add_argument("--oversubscribe", action="store_true", help="start more workers than the cores can bear")
    _add(run, RUN)
    run.add_argument("--overwrite", action="store_true", help="delete the run that --output holds")
    resumed = (
        "go on with the run that --output holds, from its latest checkpoint or the one before, with the same bits "
        "(those of eager-* go by who is late)"
    )
    run.add_argument("--resume", nargs="?", const="latest", choices=["latest", "previous"], help=resumed)
    own = owners(table)
    _require_own_names(app, common=vars(parser.parse_args([])), algorithms=own)
    _add_own(parser, table, app.defaults)
    _add(of_the_app or parser, app.flags)
    parser.set_defaults(**{name: value for name, value in app.defaults.items() if name not in own})
    for action in parser._actions:
        if action.dest in app.ignores:
            action.help = SUPPRESS
    return parser


def meeting(text: str) -> str:
    """Address of a meeting place, as it was given; "" where none was."""
    host, _, port = text.rpartition(":")
    if text and not (host and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise ArgumentTypeError(f"given {text!r}, expected HOST:PORT of python -m communicators.elastic")
    return text


def _add(group: Any, flags: Sequence[Flag]) -> None:
    """Flags with their defaults, which the help takes from the parser: an app may have others than are written here."""
    for flag in flags:
        how: dict[str, Any] = {"type": flag.read, "choices": flag.choices, "metavar": flag.metavar}
        if isinstance(flag.default, bool):
            how = {"action": BooleanOptionalAction}
        elif flag.several:
            how["nargs"] = "+"
        shown = "" if flag.default is None or "(default" in flag.says else f" (default: {_shown(flag.default)})"
        group.add_argument(spelt(flag.name), default=flag.default, help=f"{flag.says}{shown}", **how)


def _shown(value: object) -> str:
    return ("on" if value else "off") if isinstance(value, bool) else "%(default)s"


def _commands_help(app: App) -> str | None:
    """Help on the app's commands for a trained model."""
    if not app.commands:
        return None
    return "what was trained: " + ", ".join(f"python -m {app.module} {name} --help" for name in app.commands)


def compressors(table: Mapping[str, Entry]) -> dict[str, str]:
    """Name in published commands -> --algorithm."""
    return {compressor: name for name, entry in table.items() for compressor in entry.compressors}


def _add_task(parser: ArgumentParser, app: App) -> None:
    group = parser.add_argument_group("task")
    add, first = group.add_argument, next(iter(app.models))
    add("--dnn", type=model_name(app), default=first, metavar="NAME", help=models_help(app))
    add("--dataset", choices=list(app.datasets), default=next(iter(app.datasets)), help="default: %(default)s")
    add("--download", action="store_true", help="fetch the data set's files that --data-dir does not have")
    _add(group, TASK)


def _add_synchronisation(parser: ArgumentParser, table: Mapping[str, Entry]) -> None:
    group = parser.add_argument_group("synchronisation")
    algorithms = f"how ranks exchange gradients or models (default: {DEFAULT}); {AUTO}: measures"
    group.add_argument("--algorithm", choices=list(table), help=algorithms)
    published = "take the algorithm that --compressor names, as published"
    group.add_argument("--compression", action="store_true", help=published)
    named = f"what published commands call an algorithm (with --compression; default: {COMPRESSED})"
    group.add_argument("--compressor", choices=list(compressors(table)), help=named)
    _add(group, [OVERLAP])


def _add_own(parser: ArgumentParser, table: Mapping[str, Entry], defaults: Mapping[str, object]) -> None:
    """The algorithms' own flags, those of the same algorithms together; without defaults, to tell what was given."""
    groups: dict[str, Any] = {}
    for name, takers in owners(table).items():
        variants = {taker: flag for taker in takers for flag in table[taker].flags if flag.name == name}
        heading = f"only with --algorithm {', '.join(takers)}"
        if heading not in groups:
            groups[heading] = parser.add_argument_group(heading)
        flag = variants[takers[0]]
        says = f"{flag.says} (default: {_defaults(variants, defaults.get(name))})"
        choices = list(dict.fromkeys(choice for own in variants.values() for choice in own.choices or ()))
        _add(groups[heading], [replace(flag, default=None, says=says, choices=choices or None)])


def _defaults(variants: Mapping[str, Flag], given: object) -> str:
    """The most usual one, and whose is another."""
    if given is not None:
        return str(given)
    values = [flag.default for flag in variants.values()]
    usual = max(values, key=values.count)
    return ", ".join(
        [str(usual), *(f"{name}: {flag.default}" for name, flag in variants.items() if flag.default != usual)]
    )


def spelt(name: str) -> str:
    """Spell a flag's name as on the command line."""
    return f"--{name.replace('_', '-')}"


OWN = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


def model_name(app: App) -> Callable[[str], str]:
    """A check of the flag's value, without importing the model."""

    def check(text: str) -> str:
        if text in app.models:
            return text
        if text in app.elsewhere:
            raise ArgumentTypeError(f"{text} is a model of another app: {app.elsewhere[text]}")
        if not (app.own_models and OWN.fullmatch(text)):
            known = ", ".join(map(repr, app.models))
            own = ", or package.module:function for a model of your own" if app.own_models else ""
            raise ArgumentTypeError(f"given {text!r}, expected one of {known}{own}")
        package = text.partition(":")[0].partition(".")[0]
        if find_spec(package) is None:
            raise ArgumentTypeError(f"{text}: there is no package {package!r} in this folder or on PYTHONPATH")
        return text

    return check


def models_help(app: App) -> str:
    """Help on --dnn."""
    own = "; or package.module:function" if app.own_models else ""
    return f"model: {', '.join(app.models)}{own} (default: {next(iter(app.models))})"


ENTRIES = RECORDED | {field.name for field in fields(Options)}


def _require_own_names(app: App, *, common: Collection[str], algorithms: Collection[str]) -> None:
    """UsageError, naming the flag and the app, for a name that is taken.

    common: of the trainer's flags. algorithms: of those that single algorithms have, the app's among them.
    """
    taken = dict.fromkeys({*common, *ENTRIES, "help"}, "the trainer")
    for name in algorithms:
        _require_free(app, name, taken)
    taken = dict.fromkeys(algorithms, "an algorithm") | taken
    for flag in app.flags:
        _require_free(app, flag.name, taken)
        taken[_positive(flag.name)] = "another flag of its own"


def _require_free(app: App, name: str, taken: dict[str, str]) -> None:
    if not name.isidentifier():
        raise UsageError(
            f"{app.module} defines a flag {name!r:.40}: name it by letters, digits and _ (which is - there)"
        )
    if (owner := taken.get(_positive(name))) is not None:
        raise UsageError(f"{app.module} defines a flag {name!r:.40}, a name that {owner} has: give it another")


def _positive(name: str) -> str:
    """--no-NAME is spoken of together with --NAME."""
    return name.removeprefix("no_")
