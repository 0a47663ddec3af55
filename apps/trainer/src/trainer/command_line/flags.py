"""The command line that all apps share: parsed and checked once, before torch is loaded."""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from trainer.app import App
from trainer.command_line import quantities
from trainer.command_line.options import Options
from trainer.errors import RunError
from trainer.training.learning_rate import SHAPES
from trainer.training.synchronisation import DENSE_WIRES, SYNCHRONISATIONS, WIRES

# --compressor NAME as published -> --algorithm NAME; the other sparse algorithms have one name in both.
PUBLISHED = {"none": "dense", "topk": "topk-allgather", "topkA": "topk-allgather", "topkDSA": "topk-dsa"}


class _Parser(ArgumentParser):
    """An `ArgumentParser` that leaves printing and exiting to the caller: with many ranks only one speaks."""

    def error(self, message: str) -> NoReturn:
        raise RunError(f"{message} (python -m {self.prog} --help lists all flags)")


def parse(argv: Sequence[str], app: App, *, world_size: int | None) -> Options:
    """The run that `argv` asks for; RunError says which flag is wrong and what was expected.

    world_size: ranks that a launcher has started; None if this process was started by itself.
    """
    parser = _parser(app)
    given = parser.parse_args(argv)
    try:
        given.algorithm = _algorithm(given)
        given.nworkers = _nworkers(given.nworkers, world_size)
        _check_teams(given)
        _check_wire(given)
        _check_output(given)
    except RunError as error:
        parser.error(str(error))
    given.output = given.output or Path("runs") / f"{app.module}-{given.dnn}-{given.dataset}-{given.algorithm}"
    del given.compression, given.compressor
    return Options(**vars(given))


def _algorithm(given: Namespace) -> str:
    if given.compressor and not given.compression:
        raise RunError(f"--compressor {given.compressor} has no effect without --compression: add it")
    if not given.compression:
        return str(given.algorithm or "dense")
    name = given.compressor or "gtopk"
    algorithm = PUBLISHED.get(name, name)
    if given.algorithm not in (None, algorithm):
        raise RunError(f"--compression --compressor {name} and --algorithm {given.algorithm} differ: give one of them")
    return str(algorithm)


def _nworkers(asked: int | None, world_size: int | None) -> int:
    if None not in (asked, world_size) and asked != world_size:
        raise RunError(
            f"--nworkers {asked}, but the launcher started {world_size}: give both the same number, "
            f"or leave --nworkers out"
        )
    return asked or world_size or 1


def _check_teams(given: Namespace) -> None:
    if given.teams > 1 and given.algorithm != "spardl":
        raise RunError(f"--teams {given.teams} has no effect on {given.algorithm}: it is for spardl")
    if given.nworkers % given.teams:
        raise RunError(f"--teams {given.teams} does not divide the {given.nworkers} workers into equal teams")


def _check_wire(given: Namespace) -> None:
    if given.algorithm == "dense" and given.wire not in DENSE_WIRES:
        raise RunError(f"--wire {given.wire} is for sparse gradients; a dense sum takes {', '.join(DENSE_WIRES)}")


def _check_output(given: Namespace) -> None:
    if given.resume and given.overwrite:
        raise RunError("--resume goes on with a run and --overwrite deletes it: give one of them")
    if given.output is not None and not given.output.name:
        raise RunError(f"--output {str(given.output)!r} names no folder: give one of its own, or leave --output out")
    if given.tensorboard and find_spec("tensorboard") is None:
        raise RunError("--tensorboard needs the tensorboard package: pip install tensorboard")


def _parser(app: App) -> ArgumentParser:
    parser = _Parser(prog=app.module, allow_abbrev=False)
    add = parser.add_argument
    add("--dnn", choices=list(app.models), default=next(iter(app.models)), help="model")
    add("--dataset", choices=list(app.datasets), default=next(iter(app.datasets)), help="data set")
    add("--data-dir", type=Path, default=Path("data"), metavar="DIR", help="where the data set's files are")
    _add_synchronisation(parser)
    _add_optimisation(parser)
    _add_run(parser)
    parser.set_defaults(**app.defaults)
    return parser


def _add_synchronisation(parser: ArgumentParser) -> None:
    add = parser.add_argument_group("synchronisation").add_argument
    sparse = [name for name in SYNCHRONISATIONS if name != "dense"]
    add("--algorithm", choices=list(SYNCHRONISATIONS), help="how ranks share gradients (default: dense)")
    add("--compression", action="store_true", help="exchange sparse gradients, by --compressor")
    add("--compressor", choices=[*sparse, *PUBLISHED], help="sparse algorithm (with --compression; default: gtopk)")
    add("--density", type=quantities.density, default=0.01, help="share of the gradient that is sent (default: 0.01)")
    add(
        "--teams",
        type=quantities.count,
        default=1,
        metavar="D",
        help="teams of ranks for spardl (default: 1)",
    )
    add("--wire", choices=WIRES, default="fp32", help="how values travel, and sparse indices (default: fp32)")
    add(
        "--verify",
        type=quantities.count_or_zero,
        default=0,
        metavar="STEPS",
        help="compare the ranks' parameters every so many steps (default: 0, never)",
    )
    add("--nworkers", type=quantities.count, metavar="N", help="ranks; without a launcher this many are started")
    add("--oversubscribe", action="store_true", help="start more workers than this machine's cores can bear")


def _add_optimisation(parser: ArgumentParser) -> None:
    add = parser.add_argument_group("optimisation").add_argument
    add("--batch-size", type=quantities.count, default=32, help="samples per rank and step (default: 32)")
    add("--lr", type=quantities.positive, default=0.1, help="peak learning rate (default: 0.1)")
    add("--momentum", type=quantities.momentum, default=0.9, help="default: 0.9; sparse: before selection, as in DGC")
    add("--weight-decay", type=quantities.non_negative, default=0.0, help="default: 0")
    add("--clip-norm", type=quantities.positive, help="clip each rank's gradient to this norm before it is exchanged")
    add(
        "--nonfinite",
        choices=["raise", "skip"],
        default="raise",
        help="a NaN or inf in a gradient: an error that names rank and parameter, or no step (default: raise)",
    )
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
