"""The command line that all apps share: parsed and checked once, before torch is loaded."""

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from trainer.app import App
from trainer.command_line import quantities
from trainer.command_line.model_name import model_name, models_help
from trainer.command_line.options import Options
from trainer.errors import RunError
from trainer.synchronisers.table import TABLE, Flag, Synchronisation, Value, owners
from trainer.training.learning_rate import SHAPES

DEFAULT = "dense"
COMPRESSED = "gtopk"  # by --compression without --compressor


class _Parser(ArgumentParser):
    """An `ArgumentParser` that leaves printing and exiting to the caller: with many ranks only one speaks."""

    def error(self, message: str) -> NoReturn:
        raise RunError(f"{message} (python -m {self.prog} --help lists all flags)")


def parse(argv: Sequence[str], app: App, *, world_size: int | None) -> Options:
    """The run that `argv` asks for; RunError says which flag is wrong and what was expected.

    world_size: ranks that a launcher has started; None if this process was started by itself.
    """
    table = table_of(app)
    parser = _parser(app, table)
    given = parser.parse_args(argv)
    try:
        given.algorithm = _algorithm(given, table)
        given.nworkers = _nworkers(given.nworkers, world_size)
        entry = table[given.algorithm]
        entry.require_installed(given.algorithm)
        given.own = _own(given, entry, table, app.defaults)
        given.free = frozenset(flag.name for flag in entry.flags if not flag.shapes)
        entry.check(given.own, given.nworkers)
        _check_output(given)
    except RunError as error:
        parser.error(str(error))
    given.output = (
        given.output or Path("runs") / f"{app.module}-{given.dnn.replace(':', '.')}-{given.dataset}-{given.algorithm}"
    )
    del given.compression, given.compressor
    return Options(**vars(given))


def table_of(app: App) -> Mapping[str, Synchronisation]:
    """Every way of synchronising that this app offers, by name."""
    return {**TABLE, **app.synchronisations}


def _algorithm(given: Namespace, table: Mapping[str, Synchronisation]) -> str:
    if given.compressor and not given.compression:
        raise RunError(f"--compressor {given.compressor} has no effect without --compression: add it")
    if not given.compression:
        return str(given.algorithm or DEFAULT)
    compressor = given.compressor or COMPRESSED
    algorithm = _compressors(table)[compressor]
    if given.algorithm not in (None, algorithm):
        raise RunError(
            f"--compression --compressor {compressor} and --algorithm {given.algorithm} differ: give one of them"
        )
    return algorithm


def _compressors(table: Mapping[str, Synchronisation]) -> dict[str, str]:
    """What the published commands call it -> --algorithm."""
    return {compressor: name for name, entry in table.items() for compressor in entry.compressors}


def _nworkers(asked: int | None, world_size: int | None) -> int:
    if None not in (asked, world_size) and asked != world_size:
        raise RunError(
            f"--nworkers {asked}, but the launcher started {world_size}: give both the same number, "
            f"or leave --nworkers out"
        )
    return asked or world_size or 1


def _own(
    given: Namespace, entry: Synchronisation, table: Mapping[str, Synchronisation], defaults: Mapping[str, object]
) -> dict[str, Any]:
    """The values of the algorithm's own flags; RunError for one that others have. Takes all of them out of `given`."""
    takers = owners(table)
    asked: dict[str, Value | None] = {name: vars(given).pop(name) for name in takers}
    own = {flag.name: flag for flag in entry.flags}
    chosen: dict[str, Any] = {name: defaults.get(name, flag.default) for name, flag in own.items()}
    for name, value in asked.items():
        if value is None:
            continue
        if name not in own:
            raise RunError(
                f"{_spelt(name)} {value} is for {', '.join(takers[name])}; "
                f"{given.algorithm} has no {name.replace('_', ' ')}: leave it out"
            )
        _check_choice(own[name], value, given.algorithm)
        chosen[name] = value
    return chosen


def _check_choice(flag: Flag, value: Value, algorithm: str) -> None:
    """An algorithm may have fewer choices than others."""
    if flag.choices is not None and value not in flag.choices:
        raise RunError(f"{_spelt(flag.name)} {value} is not for {algorithm}, which takes {', '.join(flag.choices)}")


def _check_output(given: Namespace) -> None:
    if given.resume and given.overwrite:
        raise RunError("--resume goes on with a run and --overwrite deletes it: give one of them")
    if given.output is not None and not given.output.name:
        raise RunError(f"--output {str(given.output)!r} names no folder: give one of its own, or leave --output out")
    if given.tensorboard and find_spec("tensorboard") is None:
        raise RunError("--tensorboard needs the tensorboard package: pip install tensorboard")


def _parser(app: App, table: Mapping[str, Synchronisation]) -> ArgumentParser:
    parser = _Parser(prog=app.module, allow_abbrev=False)
    add = parser.add_argument
    add("--dnn", type=model_name(app), default=next(iter(app.models)), metavar="NAME", help=models_help(app))
    add("--dataset", choices=list(app.datasets), default=next(iter(app.datasets)), help="data set")
    add("--data-dir", type=Path, default=Path("data"), metavar="DIR", help="where the data set's files are")
    add("--download", action="store_true", help="fetch the data set's files that --data-dir does not have")
    add("--readers", type=quantities.count_or_zero, default=2, metavar="N", help="threads that read ahead (default: 2)")
    _add_synchronisation(parser, table)
    _add_own(parser, table, app.defaults)
    _add_optimisation(parser)
    _add_run(parser)
    own = owners(table)
    parser.set_defaults(**{name: value for name, value in app.defaults.items() if name not in own})
    return parser


def _add_synchronisation(parser: ArgumentParser, table: Mapping[str, Synchronisation]) -> None:
    add = parser.add_argument_group("synchronisation").add_argument
    add("--algorithm", choices=list(table), help=f"how ranks share what they learn (default: {DEFAULT})")
    add("--compression", action="store_true", help="take the algorithm that --compressor names, as published")
    add(
        "--compressor",
        choices=list(_compressors(table)),
        help=f"what published commands call an algorithm (with --compression; default: {COMPRESSED})",
    )
    add("--nworkers", type=quantities.count, metavar="N", help="ranks; without a launcher this many are started")
    add("--oversubscribe", action="store_true", help="start more workers than this machine's cores can bear")


def _add_own(parser: ArgumentParser, table: Mapping[str, Synchronisation], defaults: Mapping[str, object]) -> None:
    """The algorithms' own flags, those of the same algorithms together; without defaults, to tell what was given."""
    groups: dict[str, Any] = {}
    for name, takers in owners(table).items():
        variants = {taker: flag for taker in takers for flag in table[taker].flags if flag.name == name}
        title = f"only with --algorithm {', '.join(takers)}"
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        flag = variants[takers[0]]
        groups[title].add_argument(
            _spelt(name),
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


def _spelt(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _add_optimisation(parser: ArgumentParser) -> None:
    add = parser.add_argument_group("optimisation").add_argument
    add("--batch-size", type=quantities.count, default=32, help="samples per rank and step (default: 32)")
    add("--lr", type=quantities.positive, default=0.1, help="peak learning rate (default: 0.1)")
    add("--momentum", type=quantities.momentum, default=0.9, help="default: 0.9; sparse: before selection, as in DGC")
    add("--weight-decay", type=quantities.non_negative, default=0.0, help="default: 0")
    add("--clip-norm", type=quantities.positive, help="clip each rank's gradient to this norm before it is exchanged")
    add("--max-epochs", type=quantities.count, default=20, help="default: 20")
    add("--warmup-epochs", type=quantities.non_negative, default=0.0, help="of the learning rate (default: 0)")
    add("--lr-schedule", choices=list(SHAPES), default="cosine", help="default: cosine")
    add("--seed", type=quantities.count_or_zero, default=0, help="default: 0")


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
        "--checkpoint-every",
        type=quantities.count_or_zero,
        metavar="STEPS",
        help="0: never (default: at the end of each epoch)",
    )
    add("--tensorboard", action="store_true", help="also write TensorBoard events")
