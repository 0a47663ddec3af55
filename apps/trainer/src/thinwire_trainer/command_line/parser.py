"""The parser of the command line that all apps share: every flag, in groups that `--help` shows."""

import re
from argparse import ArgumentParser, ArgumentTypeError, BooleanOptionalAction
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from thinwire_trainer.app import App
from thinwire_trainer.command_line import quantities
from thinwire_trainer.command_line.config_file import RECORDED
from thinwire_trainer.command_line.flag import Flag, Value
from thinwire_trainer.command_line.options import KEEP, Options
from thinwire_trainer.errors import UsageError
from thinwire_trainer.synchronisers.table import AUTO, OPTIMIZERS, Entry, owners
from thinwire_trainer.training.learning_rate import SHAPES

DEFAULT = "dense"
COMPRESSED = "gtopk"  # by --compression without --compressor
SCHEDULE, MILESTONED = "cosine", "step"
ADAMW_RATE = 0.001
ADAMW_MOMENTUM, ADAMW_MOMENTUM_WAITING = 0.9, 0.5
"""β₁, and that where updates wait to be sent, which does a part of momentum's work."""
DEVICES = ("auto", "cpu", "cuda")
BACKENDS = ("gloo", "nccl")


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
    _add_optimisation(parser, app.defaults)
    _add_machine(parser)
    _add_run(parser)
    own = owners(table)
    _require_own_names(app, common=vars(parser.parse_args([])), algorithms=own)
    _add_own(parser, table, app.defaults)
    for flag in app.flags:
        _add_flag(of_the_app or parser, flag)
    parser.set_defaults(**{name: value for name, value in app.defaults.items() if name not in own})
    return parser


def _add_task(parser: ArgumentParser, app: App) -> None:
    add = parser.add_argument_group("task").add_argument
    add("--dnn", type=model_name(app), default=next(iter(app.models)), metavar="NAME", help=models_help(app))
    add("--dataset", choices=list(app.datasets), default=next(iter(app.datasets)), help="default: %(default)s")
    add("--data-dir", type=Path, default=Path("data"), metavar="DIR", help="where its files are (default: %(default)s)")
    add("--download", action="store_true", help="fetch the data set's files that --data-dir does not have")
    add(
        "--readers",
        type=quantities.count_or_zero,
        default=2,
        metavar="N",
        help="threads that read ahead (default: %(default)s)",
    )
    add(
        "--config",
        type=Path,
        metavar="FILE",
        help="settings from a run's config.json, or a file like it; a flag given here wins",
    )


def _add_flag(group: Any, flag: Flag) -> None:
    """One of the app's own."""
    says = flag.says if flag.default is None else f"{flag.says} (default: {_shown(flag.default)})"
    how: dict[str, Any] = {"type": flag.read, "choices": flag.choices, "metavar": flag.metavar}
    if isinstance(flag.default, bool):
        how = {"action": BooleanOptionalAction}
    group.add_argument(spelt(flag.name), default=flag.default, help=says, **how)


def _shown(value: Value | None) -> str:
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


def _commands_help(app: App) -> str | None:
    """What can be done with a trained model."""
    if not app.commands:
        return None
    return "what was trained: " + ", ".join(f"python -m {app.module} {name} --help" for name in app.commands)


def compressors(table: Mapping[str, Entry]) -> dict[str, str]:
    """What the published commands call it -> --algorithm."""
    return {compressor: name for name, entry in table.items() for compressor in entry.compressors}


def _add_synchronisation(parser: ArgumentParser, table: Mapping[str, Entry]) -> None:
    add = parser.add_argument_group("synchronisation").add_argument
    add(
        "--algorithm",
        choices=list(table),
        help=f"how ranks share what they learn (default: {DEFAULT}); {AUTO}: measures",
    )
    add("--compression", action="store_true", help="take the algorithm that --compressor names, as published")
    add(
        "--compressor",
        choices=list(compressors(table)),
        help=f"what published commands call an algorithm (with --compression; default: {COMPRESSED})",
    )
    add(
        "--overlap", action=BooleanOptionalAction, default=False, help="gradients travel while backward computes others"
    )


def _add_own(parser: ArgumentParser, table: Mapping[str, Entry], defaults: Mapping[str, object]) -> None:
    """The algorithms' own flags, those of the same algorithms together; without defaults, to tell what was given."""
    groups: dict[str, Any] = {}
    for name, takers in owners(table).items():
        variants = {taker: flag for taker in takers for flag in table[taker].flags if flag.name == name}
        heading = f"only with --algorithm {', '.join(takers)}"
        if heading not in groups:
            groups[heading] = parser.add_argument_group(heading)
        flag = variants[takers[0]]
        groups[heading].add_argument(
            spelt(name),
            type=flag.read,
            choices=_choices(list(variants.values())),
            metavar=flag.metavar,
            help=f"{flag.says} (default: {_defaults(variants, defaults.get(name))})",
        )


def _defaults(variants: Mapping[str, Flag], given: object) -> str:
    """The most usual one, and whose is another."""
    if given is not None:
        return str(given)
    values = [flag.default for flag in variants.values()]
    usual = max(values, key=values.count)
    return ", ".join(
        [str(usual), *(f"{name}: {flag.default}" for name, flag in variants.items() if flag.default != usual)]
    )


def _choices(variants: Sequence[Flag]) -> list[str] | None:
    """Of all algorithms that have the flag, each once."""
    if variants[0].choices is None:
        return None
    return list(dict.fromkeys(choice for flag in variants for choice in flag.choices or ()))


def spelt(name: str) -> str:
    """As on the command line."""
    return f"--{name.replace('_', '-')}"


def _add_optimisation(parser: ArgumentParser, defaults: Mapping[str, object]) -> None:
    add = parser.add_argument_group("optimisation").add_argument
    add(
        "--batch-size",
        type=quantities.count,
        default=32,
        metavar="B",
        help="samples per rank and step (default: %(default)s)",
    )
    add("--optimizer", choices=OPTIMIZERS, default=OPTIMIZERS[0], help="default: %(default)s")
    rates = f"peak learning rate (default: %(default)g; adamw: {ADAMW_RATE})"
    add("--lr", type=quantities.positive, default=0.1, help=rates)
    add(
        "--momentum",
        type=quantities.momentum,
        default=0.9,
        help="of SGD, sparse: before selection, as in DGC; of adamw β1 (default: %(default)g; adamw, sparse: "
        f"{ADAMW_MOMENTUM_WAITING:g})",
    )
    add("--nesterov", action=BooleanOptionalAction, default=False, help="Nesterov's momentum; not of sparse gradients")
    add("--weight-decay", type=quantities.non_negative, default=0.0, metavar="W", help="default: %(default)g")
    add(
        "--clip-norm",
        type=quantities.positive,
        metavar="C",
        help="clip each rank's gradient before it is exchanged, so that the norm of the mean is held to about this "
        f"(default: {defaults.get('clip_norm', 'none')})",
    )
    add(
        "--label-smoothing",
        type=quantities.smoothing,
        default=0.0,
        metavar="S",
        help="of a classifier (default: %(default)g)",
    )
    add("--max-epochs", type=quantities.count, default=20, metavar="E", help="default: %(default)s")
    add(
        "--warmup-epochs",
        type=quantities.non_negative,
        default=0.0,
        metavar="E",
        help="of the rate (default: %(default)g)",
    )
    add("--lr-schedule", choices=list(SHAPES), help=f"default: {SCHEDULE}, with --milestones {MILESTONED}")
    add(
        "--milestones",
        type=quantities.count,
        nargs="+",
        metavar="E",
        help="epochs after which the rate is a tenth of what it was (default: 1/2 and 3/4 of the run)",
    )
    add("--seed", type=quantities.seed, default=0, help="default: %(default)s")


def _add_machine(parser: ArgumentParser) -> None:
    add = parser.add_argument_group("machine").add_argument
    add("--nworkers", type=quantities.count, metavar="N", help="ranks; without a launcher this many are started")
    add("--oversubscribe", action="store_true", help="start more workers than this machine's cores can bear")
    add("--device", choices=DEVICES, default=DEVICES[0], help="auto: a GPU of its own for each local rank, if there is")
    add(
        "--backend",
        choices=BACKENDS,
        default=BACKENDS[0],
        help="between torchrun's ranks; nccl: GPUs (default: %(default)s)",
    )
    add("--amp", action=BooleanOptionalAction, default=False, help="forward passes of training in bfloat16 (autocast)")
    add("--compile", action=BooleanOptionalAction, default=False, help="the model by torch.compile")


def _add_run(parser: ArgumentParser) -> None:
    add = parser.add_argument_group("run").add_argument
    add("--output", type=Path, metavar="DIR", help="metrics, checkpoints, model (default: runs/APP-DNN-DATASET-ALGO)")
    add("--overwrite", action="store_true", help="delete the run that --output holds")
    add(
        "--resume",
        nargs="?",
        const="latest",
        choices=["latest", "previous"],
        help="go on with the run that --output holds, from its latest checkpoint or the one before",
    )
    add(
        "--residuals",
        choices=["carry", "drop"],
        help="of a run that is resumed with another number of ranks: shared out among them, or left behind",
    )
    add(
        "--checkpoint-every",
        type=quantities.count_or_zero,
        metavar="STEPS",
        help="0: never (default: at the end of each epoch)",
    )
    add("--keep", type=quantities.count, metavar="N", help=f"checkpoints, the newest (default: {KEEP})")
    add("--tensorboard", action=BooleanOptionalAction, default=False, help="also write TensorBoard events")
    add(
        "--profile",
        action=BooleanOptionalAction,
        default=False,
        help="also write a trace of a few steps, for Perfetto or chrome://tracing",
    )


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
    """What the flag takes."""
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
