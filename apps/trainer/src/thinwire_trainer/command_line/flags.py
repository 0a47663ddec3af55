"""The command line that all apps share: parsed and checked once, before torch is loaded."""

from argparse import ArgumentParser, Namespace
from collections.abc import Collection, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from thinwire_trainer.app import App
from thinwire_trainer.command_line import config_file
from thinwire_trainer.command_line.flag import Flag, Value
from thinwire_trainer.command_line.options import DATA_DIR, KEEP, Options
from thinwire_trainer.command_line.parser import (
    ADAMW_MOMENTUM,
    ADAMW_MOMENTUM_WAITING,
    ADAMW_RATE,
    COMMON,
    COMPRESSED,
    DEFAULT,
    MILESTONED,
    MUON_MOMENTUM,
    SCHEDULE,
    compressors,
    parser_of,
    spelt,
)
from thinwire_trainer.command_line.quantities import NO_DELAY
from thinwire_trainer.errors import RunError
from thinwire_trainer.synchronisers.table import AUTO, CHOOSING, OPTIMIZERS, TABLE, Entry, Synchronisation, owners

OF_AN_OPTIMIZER = {"optimizer", "lr", "momentum", "nesterov", "weight_decay"}
"""What a file says of one optimizer is not for another that the command line names."""

PROMETHEUS = (("prometheus_client", "prometheus_client"),)
METRICS_NEED = {
    "prometheus": PROMETHEUS,
    "file": PROMETHEUS,
    "otlp": (
        ("opentelemetry.sdk", "opentelemetry-sdk"),
        ("opentelemetry.exporter.otlp.proto.http", "opentelemetry-exporter-otlp-proto-http"),
    ),
}
"""Modules that each kind of --metrics takes, and the packages that have them."""


def parse(argv: Sequence[str], app: App, *, world_size: int | None) -> Options:
    """The run that `argv` asks for; RunError says which flag is wrong and what was expected.

    world_size: ranks that a launcher has started; None if this process was started by itself.
    """
    table = entries_of(app)
    parser = parser_of(app, table)
    defaults, explicit = _given(parser, argv)
    try:
        said = explicit
        if explicit.get("config") is not None:
            said = _from_file(explicit, defaults, parser, app, world_size) | explicit
        given = Namespace(**{**defaults, **said})
        _check_ignored(given, app, parser)
        options = _checked(given, app, table, world_size, said=said)
        _check_length(options, explicit)
        _check_keep(options, explicit)
        _check_bundled(options, app)
        app.check(options)
        return options
    except RunError as error:
        parser.error(str(error))


def _given(parser: ArgumentParser, argv: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The default of every flag, and what the command line says, by destination."""
    defaults, unset = vars(parser.parse_args([])), object()
    given = vars(parser.parse_args(argv, Namespace(**dict.fromkeys(defaults, unset))))
    return defaults, {name: value for name, value in given.items() if value is not unset}


def _from_file(
    explicit: Mapping[str, Any],
    defaults: Mapping[str, Any],
    parser: ArgumentParser,
    app: App,
    world_size: int | None,
) -> dict[str, Any]:
    """Values in --config's file, besides those on the command line.

    An optimizer or an algorithm that the command line names takes none of another's flags, and not its defaults.
    """
    file, table = config_file.read(explicit["config"], parser, known=defaults, explicit=explicit), entries_of(app)
    recorded = config_file.entries(explicit["config"])
    optimizer = recorded.get("optimizer", OPTIMIZERS[0])
    others: set[str] = set()
    if world_size is not None:  # the launcher has decided
        others.add("nworkers")
    if explicit.get("optimizer") not in (None, optimizer):
        others |= OF_AN_OPTIMIZER
    if not {"algorithm", "compression"}.isdisjoint(explicit):
        algorithm = _algorithm(Namespace(**{**defaults, **file, **explicit}), table)
        others |= owners(table).keys() - {flag.name for flag in table[algorithm].flags}
        then = table.get(str(recorded.get("algorithm")))
        if then not in (None, table[algorithm]):
            usual = {name: defaults[name] for name in ("lr", "momentum", "nesterov")}
            usual |= {flag.name: app.defaults.get(flag.name, flag.default) for flag in then.flags}
            usual |= optimizer_defaults(then, optimizer)
            others |= {name for name, value in usual.items() if file.get(name) == value}
    return {name: value for name, value in file.items() if name not in others}


def _checked(
    given: Namespace, app: App, table: Mapping[str, Entry], world_size: int | None, *, said: Collection[str]
) -> Options:
    """said: what the command line or the file say; all else has its default."""
    given.algorithm = _algorithm(given, table)
    entry = table[given.algorithm]
    _check_elastic(given, entry)
    given.nworkers = _nworkers(given.nworkers, world_size)
    entry.require_installed(given.algorithm)
    given.own = _own(given, entry, table, app.defaults)
    given.app = {flag.name: vars(given).pop(flag.name) for flag in app.flags}
    given.declared, given.momentum_said = (*COMMON, *entry.flags, *app.flags), "momentum" in said
    entry.check(given.own, given.nworkers if given.elastic is None else 0)
    if given.elastic is not None and given.own.get("inject_delay", NO_DELAY) != NO_DELAY:
        raise RunError("--inject-delay names ranks, and those of --elastic change: leave it out")
    _check_overlap(given, entry)
    _check_optimizer(given, entry, said)
    _check_momentum(given, entry, said)
    _check_rate(given)
    _check_machine(given)
    _check_output(given)
    name = f"{app.module.removeprefix('thinwire_')}-{given.dnn.replace(':', '.')}-{given.dataset}-{given.algorithm}"
    given.output = given.output or Path("runs") / name
    del given.compression, given.compressor, given.config
    return Options(**vars(given))


def table_of(app: App) -> Mapping[str, Synchronisation]:
    """Every way of synchronising that this app offers, by name."""
    return {**TABLE, **app.synchronisations}


def entries_of(app: App) -> Mapping[str, Entry]:
    """Every --algorithm: these, and the one that chooses among them."""
    return {**table_of(app), AUTO: CHOOSING}


def _algorithm(given: Namespace, table: Mapping[str, Entry]) -> str:
    if given.compressor and not given.compression:
        raise RunError(f"--compressor {given.compressor} has no effect without --compression: add it")
    if not given.compression:
        return str(given.algorithm or DEFAULT)
    compressor = given.compressor or COMPRESSED
    algorithm = compressors(table)[compressor]
    if given.algorithm not in (None, algorithm):
        raise RunError(
            f"--compression --compressor {compressor} and --algorithm {given.algorithm} differ: give one of them"
        )
    return algorithm


def _nworkers(asked: int | None, world_size: int | None) -> int:
    if None not in (asked, world_size) and asked != world_size:
        raise RunError(
            f"--nworkers {asked}, but the launcher started {world_size}: give both the same number, "
            f"or leave --nworkers out"
        )
    return asked or world_size or 1


def _check_elastic(given: Namespace, entry: Entry) -> None:
    if given.elastic is None:
        if given.at_least is not None:
            raise RunError(f"--at-least {given.at_least} is for ranks that come and go: give it with --elastic")
        return
    if not entry.elastic:
        why = "measures a fixed number of ranks" if given.algorithm == AUTO else "counts on a fixed number of ranks"
        raise RunError(f"--elastic is not for {given.algorithm}, which {why}: take another --algorithm")
    if given.nworkers is not None:
        raise RunError(
            f"--nworkers {given.nworkers} starts a fixed number of ranks: leave it out, and start every elastic rank "
            f"by itself; --at-least says how many train"
        )
    if given.backend == "nccl":
        raise RunError("--backend nccl is for a fixed number of ranks, elastic ones talk by gloo: leave it out")
    if given.checkpoint_every:
        raise RunError(
            f"--checkpoint-every {given.checkpoint_every} is of a fixed number of ranks; elastic ones write a "
            f"checkpoint at the end of each epoch: leave it out"
        )


def _own(given: Namespace, entry: Entry, table: Mapping[str, Entry], defaults: Mapping[str, object]) -> dict[str, Any]:
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
                f"{spelt(name)} {value} is for {', '.join(takers[name])}; "
                f"{given.algorithm} has no {name.replace('_', ' ')}: leave it out"
            )
        _check_choice(own[name], value, given.algorithm)
        chosen[name] = value
    return chosen


def _check_choice(flag: Flag, value: Value, algorithm: str) -> None:
    """An algorithm may have fewer choices than others."""
    if flag.choices is not None and value not in flag.choices:
        raise RunError(f"{spelt(flag.name)} {value} is not for {algorithm}, which takes {', '.join(flag.choices)}")


def _check_overlap(given: Namespace, entry: Entry) -> None:
    if given.overlap and not entry.overlaps:
        raise RunError(f"--overlap is for gradients that are exchanged, and {given.algorithm} has none: leave it out")


def _check_optimizer(given: Namespace, entry: Entry, said: Collection[str]) -> None:
    """Also gives AdamW, Muon and the algorithm their own defaults."""
    if given.optimizer not in entry.optimizers:
        raise RunError(
            f"--optimizer {given.optimizer} is not for {given.algorithm}, which takes {', '.join(entry.optimizers)}"
        )
    own = optimizer_defaults(entry, given.optimizer)
    vars(given).update({name: value for name, value in own.items() if name not in said})
    if given.optimizer == "sgd":
        return
    if given.nesterov:
        raise RunError("--nesterov is a form of SGD's momentum: AdamW has none, Muon always has it; leave it out")
    if given.overlap and not entry.nesterov:  # where it may be updates that are selected from
        raise RunError(
            f"--overlap sends gradients during backward, and with --optimizer adamw {given.algorithm} sends what AdamW "
            f"makes of them, after it: leave it out"
        )


def optimizer_defaults(entry: Entry, optimizer: str) -> Mapping[str, float]:
    """Settings of this optimizer under this algorithm that are not the app's, by name, where they are not given.

    AdamW has less momentum where updates wait, or gradients come late: those have Nesterov's form of SGD's.
    """
    if optimizer == "sgd":
        return entry.defaults
    at_once = entry.nesterov and "nesterov" not in entry.defaults
    adamw = ADAMW_MOMENTUM if at_once else ADAMW_MOMENTUM_WAITING
    return {"lr": ADAMW_RATE, "momentum": MUON_MOMENTUM if optimizer == "muon" else adamw}


def _check_momentum(given: Namespace, entry: Entry, said: Collection[str]) -> None:
    if not given.momentum and "nesterov" not in said:
        given.nesterov = False
    if not given.nesterov:
        return
    if not entry.nesterov:
        has = "may choose what has" if given.algorithm == AUTO else "has"
        raise RunError(
            f"--nesterov is a form of SGD's momentum, and {given.algorithm} {has} its own before the selection: "
            f"leave it out"
        )
    if not given.momentum:
        raise RunError("--nesterov has no effect with --momentum 0: leave it out, or give a momentum")


def _check_rate(given: Namespace) -> None:
    """Says which schedule; milestones are a form of one."""
    if given.milestones is None:
        given.lr_schedule = given.lr_schedule or SCHEDULE
        return
    if given.lr_schedule not in (None, MILESTONED):
        raise RunError(
            f"--milestones are those of --lr-schedule {MILESTONED}, not {given.lr_schedule}: give one of them"
        )
    if sorted(set(given.milestones)) != given.milestones:
        raise RunError(
            f"--milestones {' '.join(map(str, given.milestones))}: give epochs in ascending order, each once"
        )
    given.lr_schedule = MILESTONED


def _check_bundled(options: Options, app: App) -> None:
    """RunError for a flag about files with a data set that has none."""
    if (why := app.bundled.get(options.dataset)) and (options.download or options.data_dir != DATA_DIR):
        flag = "--download" if options.download else f"--data-dir {options.data_dir}"
        raise RunError(f"{flag} has no effect on {options.dataset}, which {why}: leave it out")


def _check_length(options: Options, explicit: Collection[str]) -> None:
    """That a warm-up ends, of a run that cannot go on with more epochs. A file's may be cut short, for a trial."""
    fixed = "max_epochs" in options.settings() and not options.resume
    if fixed and "warmup_epochs" in explicit and options.warmup_epochs >= options.max_epochs:
        raise RunError(
            f"--warmup-epochs {options.warmup_epochs:g} with --max-epochs {options.max_epochs} would never reach --lr "
            f"{options.lr:g}: give fewer, or more epochs"
        )


def _check_keep(options: Options, explicit: Collection[str]) -> None:
    """A run's own config.json has both."""
    if "keep" in explicit and options.checkpoint_every == 0:
        raise RunError(
            f"--keep {options.keep} has no effect with --checkpoint-every 0, which writes none: leave one out"
        )


def _check_ignored(given: Namespace, app: App, parser: ArgumentParser) -> None:
    for name in sorted(app.ignores):
        value = vars(given)[name]
        if value == parser.get_default(name):
            continue
        values = value if isinstance(value, list) else [] if isinstance(value, bool) else [value]
        raise RunError(f"{' '.join(map(str, [spelt(name), *values]))} has no effect on {app.module}: leave it out")


def _check_machine(given: Namespace) -> None:
    if given.backend == "nccl" and given.device == "cpu":
        raise RunError("--backend nccl is for GPUs, and --device cpu leaves them alone: give one of them")


def _check_output(given: Namespace) -> None:
    given.keep = given.keep or KEEP
    if given.resume and given.overwrite:
        raise RunError("--resume goes on with a run and --overwrite deletes it: give one of them")
    if given.residuals and not given.resume:
        raise RunError(
            f"--residuals {given.residuals} is for --resume with another number of ranks: give it with --resume, "
            f"or leave it out"
        )
    if given.output is not None and not given.output.name:
        raise RunError(f"--output {str(given.output)!r} names no folder: give one of its own, or leave --output out")
    if given.tensorboard and find_spec("tensorboard") is None:
        raise RunError("--tensorboard needs the tensorboard package: pip install tensorboard")
    kind = (given.metrics or "").partition(":")[0]
    if missing := [package for module, package in METRICS_NEED.get(kind, ()) if not _is_there(module)]:
        raise RunError(f"--metrics {kind} needs what is not installed: pip install {' '.join(missing)}")


def _is_there(module: str) -> bool:
    """Whether a module is installed, also where the package that would have it is not."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False
