"""Ways of synchronising by name: what makes each, and the flags that it alone takes. One entry is one `--algorithm`.

Imports nothing heavy: flags are checked before torch is loaded, and a maker is found when it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from thinwire_trainer.command_line import quantities
from thinwire_trainer.command_line.delay import delay, require_ranks
from thinwire_trainer.command_line.flag import Flag, Value
from thinwire_trainer.errors import RunError
from thinwire_trainer.synchronisers.literals import literal_dict

if TYPE_CHECKING:
    from communicators import Communicator
    from torch import nn

    from thinwire_trainer.command_line.options import Options
    from thinwire_trainer.synchronisers.synchroniser import Rates, Synchroniser

    Make = Callable[[Options, nn.Module, Communicator, Rates], Synchroniser]

OPTIMIZERS = ("sgd", "adamw")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What a user may say about an `--algorithm`.

    compressors: what --compressor calls it. check: (own values, workers); raises RunError for what does not fit.
    overlaps: whether its exchange may begin during backward.
    nesterov: whether its momentum is SGD's own, which has this form.
    optimizers: the values of --optimizer that it makes something of.
    needs: the distribution that it comes with, where that may not be installed; imported by the name with "_" for "-".
    """

    flags: Sequence[Flag] = ()
    nesterov: bool = True
    optimizers: Sequence[str] = ("sgd",)
    overlaps: bool = False
    compressors: Sequence[str] = ()
    check: Callable[[Mapping[str, Value], int], None] = lambda own, workers: None
    needs: str = ""

    @property
    def free(self) -> frozenset[str]:
        """Its flags that may differ between a run and its continuation."""
        return frozenset(flag.name for flag in self.flags if not flag.shapes)

    def require_installed(self, name: str) -> None:
        """RunError that says what to install."""
        if self.needs and find_spec(self.needs.replace("-", "_")) is None:
            raise RunError(f"--algorithm {name} needs the {self.needs} package: pip install {self.needs}")


@dataclass(frozen=True, kw_only=True)
class Synchronisation(Entry):
    """An entry, and what makes the `Synchroniser`.

    make: (options, model, comm, rates) -> Synchroniser; options.own has a value for every flag.
    """

    make: Make


def lazily(place: str) -> Make:
    """The maker at "package.module:function", imported when it is called."""

    def make(*given: Any) -> Synchroniser:
        made: Synchroniser = resolve_name(place)(*given)
        return made

    return make


def _check_teams(own: Mapping[str, Value], workers: int) -> None:
    if workers % int(own["teams"]):
        raise RunError(f"--teams {own['teams']} does not divide the {workers} workers into equal teams")


def _check_alpha(own: Mapping[str, Value], workers: int) -> None:
    if own["alpha"] == "auto":
        raise RunError("--alpha auto is for easgd and slowmo: give a number")


def _check_pull(own: Mapping[str, Value], workers: int) -> None:
    """`local_sgd.algorithms.easgd` has the reason; auto lies within."""
    limit = 2 / (workers + 1)
    if own["alpha"] != "auto" and not 0 < float(own["alpha"]) < limit:
        raise RunError(
            f"--alpha {own['alpha']} is outside easgd's range for {workers} workers, 0 < alpha < 2/(workers + 1) = "
            f"{limit:.4g}: give one within, or leave it out"
        )


def _check_delay(own: Mapping[str, Value], workers: int) -> None:
    require_ranks(str(own["inject_delay"]), workers)


def _check_threshold(own: Mapping[str, Value], workers: int) -> None:
    if own["select"] == "threshold" and not own["threshold"]:
        raise RunError("--select threshold takes entries from a magnitude on: give it with --threshold")
    if own["threshold"] and own["select"] != "threshold":
        raise RunError(f"--threshold {own['threshold']} has no effect on --select {own['select']}: leave it out")


NONFINITE = Flag(
    name="nonfinite",
    default="raise",
    choices=("raise", "skip"),
    says="a NaN or inf in a gradient: an error that names rank and parameter, or no step",
)
VERIFY = Flag(
    name="verify",
    default=0,
    read=quantities.count_or_zero,
    metavar="STEPS",
    says="compare the ranks' parameters every so many steps; 0: never",
    shapes=False,
)
WIRE = Flag(
    name="wire",
    default="fp32",
    choices=literal_dict("wire/wire", "WIRES"),
    says="how values travel, and sparse indices",
)
DENSE_WIRE = replace(WIRE, choices=literal_dict("wire/half", "DENSE_WIRES"))
DENSITY = Flag(name="density", default=0.01, read=quantities.density, says="share of the gradient that is sent")
DENSITY_WARMUP = Flag(
    name="density_warmup",
    default="0",
    read=quantities.steps_or_stages,
    metavar="STEPS",
    says="of which all of the gradient is sent, before the density counts; dgc:STEPS: 25 %%, 6 %%, 1.6 %%, … in them",
)
SELECT = Flag(
    name="select",
    default="topk",
    choices=("topk", "dgc", "gaussiank", "randomk", "threshold"),
    says="how the entries that are sent are chosen, at most the density's share",
)
THRESHOLD = Flag(
    name="threshold",
    default=0.0,
    read=quantities.non_negative,
    metavar="T",
    says="the least magnitude that --select threshold takes",
)
TEAMS = Flag(name="teams", default=1, read=quantities.count, metavar="D", says="teams of ranks; divide their number")
RANK = Flag(name="rank", default=2, read=quantities.count, metavar="R", says="columns of each matrix's two factors")
DENSE_STEPS = Flag(
    name="dense_steps",
    default=100,
    read=quantities.count_or_zero,
    metavar="STEPS",
    says="first steps, summed whole; of a short training a tenth",
)

INJECT_DELAY = Flag(
    name="inject_delay",
    default="none",
    read=delay,
    metavar="WHOM=SECONDS",
    says="holds ranks up at every step, for experiments: fixed:0,3=0.2, random:2=0.32 (so many, drawn anew) or "
    "linear=0.001 (times the rank)",
    shapes=False,
)

SYNCHRONOUS = "thinwire_trainer.synchronisers.synchronous"
DENSE = Synchronisation(
    make=lazily(f"{SYNCHRONOUS}:dense"),
    flags=(DENSE_WIRE, NONFINITE, VERIFY, INJECT_DELAY),
    check=_check_delay,
    compressors=("none",),
    optimizers=OPTIMIZERS,
    overlaps=True,
)
SPARSE = Synchronisation(
    make=lazily(f"{SYNCHRONOUS}:sparse"),
    flags=(DENSITY, DENSITY_WARMUP, WIRE, NONFINITE, VERIFY),
    nesterov=False,
    optimizers=OPTIMIZERS,
    overlaps=True,
)
WHOLE = Synchronisation(
    make=lazily(f"{SYNCHRONOUS}:whole"), flags=(NONFINITE, VERIFY), optimizers=OPTIMIZERS, overlaps=True
)

SYNC_EVERY = Flag(name="sync_every", default=4, read=quantities.count, metavar="STEPS", says="steps between averages")
ALPHA = Flag(
    name="alpha",
    default="auto",
    read=quantities.non_negative_or_auto,
    says="how far the model goes (slowmo; auto: 1 - beta), or ranks and anchor pull at each other (auto: 0.9 / ranks)",
)
BETA = Flag(name="beta", default=0.4, read=quantities.momentum, says="momentum of the anchor")
BLOCK_MOMENTUM = Flag(
    name="block_momentum", default="auto", read=quantities.momentum_or_auto, says="auto: 1 - 1 / ranks, at most 0.875"
)
BLOCK_RATE = Flag(
    name="block_rate",
    default="auto",
    read=quantities.or_auto(quantities.positive),
    says="of what a block of steps changed; auto: 1 - block momentum",
)
OUTER = (
    Flag(name="outer_rate", default=0.7, read=quantities.positive, says="of the outer SGD"),
    Flag(name="outer_momentum", default=0.9, read=quantities.momentum, says="of the outer SGD, Nesterov's"),
)
COMPRESS = Flag(
    name="compress",
    default="none",
    choices=("none", "int8", "int4"),
    says="the change since the last agreed model travels in so many bits, what is rounded off later",
)
FRAGMENTS = Flag(name="fragments", default=4, read=quantities.count, says="that travel one after another")
DELAY = Flag(
    name="delay",
    default=1,
    read=quantities.count_or_zero,
    metavar="STEPS",
    says="between a fragment's launch and its use",
)
PERIODIC = Synchronisation(
    make=lazily("thinwire_trainer.synchronisers.periodic:periodic"), flags=(SYNC_EVERY,), optimizers=OPTIMIZERS
)

AVERAGING: dict[str, dict[str, Any]] = {
    "local-sgd": {"flags": (SYNC_EVERY, COMPRESS)},
    "bmuf": {"flags": (SYNC_EVERY, BLOCK_RATE, BLOCK_MOMENTUM)},
    "slowmo": {"flags": (SYNC_EVERY, ALPHA, BETA)},
    "easgd": {"flags": (SYNC_EVERY, ALPHA), "check": _check_pull},
    "overlap-local-sgd": {
        "flags": (replace(SYNC_EVERY, default=2), replace(ALPHA, default=0.6), replace(BETA, default=0.7)),
        "check": _check_alpha,
    },
    "diloco": {"flags": (replace(SYNC_EVERY, default=20), *OUTER, COMPRESS)},
    "streaming-diloco": {
        "flags": (replace(SYNC_EVERY, default=20), replace(ALPHA, default=0.5), *OUTER, COMPRESS, FRAGMENTS, DELAY),
        "check": _check_alpha,
    },
}
"""What an algorithm of local-sgd has besides --sync-every."""

CHOSEN: dict[str, Any] = {"flags": (SELECT, THRESHOLD, *SPARSE.flags), "check": _check_threshold}
"""Where the algorithm leaves it to others what is selected."""


def _grace(text: str) -> str:
    """Seconds, or a share such as 0.5x."""
    quantities.non_negative(text.removesuffix("x"))
    return text


def _check_quorum(own: Mapping[str, Value], workers: int) -> None:
    _check_delay(own, workers)
    if own["quorum"] != "auto" and int(own["quorum"]) > workers:
        raise RunError(f"--quorum {own['quorum']} is more than the {workers} workers")


EAGER = Synchronisation(
    make=lazily("thinwire_trainer.synchronisers.eager:eager"),
    flags=(
        Flag(
            name="grace",
            default="0",
            read=_grace,
            metavar="SECONDS",
            says="that a round waits for more ranks once its quorum is there; 0.5x: half of the median round",
        ),
        Flag(
            name="max_staleness",
            default=8,
            read=quantities.count_or_zero,
            metavar="ROUNDS",
            says="in a row that a rank may miss; then they wait for it",
        ),
        INJECT_DELAY,
    ),
    optimizers=OPTIMIZERS,
    check=_check_delay,
)
QUORUM = Flag(
    name="quorum",
    default="auto",
    read=quantities.or_auto(quantities.count),
    metavar="RANKS",
    says="with so many a round begins; auto: half of them",
)

OWN: dict[str, dict[str, Any]] = {
    "topk-allgather": {"compressors": ("topk", "topkA"), **CHOSEN},
    "topk-dsa": {"compressors": ("topkDSA",), **CHOSEN},
    "gtopk": CHOSEN,
    "spardl": {"flags": (TEAMS, *SPARSE.flags), "check": _check_teams},
    "powersgd": {"flags": (RANK, DENSE_STEPS, *WHOLE.flags)},
}
"""What an algorithm of sparse-collectives has besides the others of its kind."""

TABLE: dict[str, Synchronisation] = {
    "dense": DENSE,
    **{
        name: replace(SPARSE, **{"compressors": (name,), **OWN.get(name, {})})
        for name in literal_dict("algorithms/table", "ALGORITHMS")
        if name != "dense"
    },
    **{name: replace(WHOLE, **OWN.get(name, {})) for name in literal_dict("training/schemes/table", "WHOLE")},
    **{
        name: replace(PERIODIC, **AVERAGING.get(name, {}))
        for name in literal_dict("__init__", "ALGORITHMS", package="local_sgd")
    },
    "eager-solo": EAGER,
    "eager-majority": EAGER,
    "eager-quorum": replace(EAGER, flags=(QUORUM, *EAGER.flags), check=_check_quorum),
}


AUTO = "auto"
CHOOSING = Entry(flags=SPARSE.flags, nesterov=False, optimizers=OPTIMIZERS, overlaps=True)
"""What `AUTO` takes: the flags that all it may choose share. What it chooses is in the `TABLE`, and makes itself."""


def owners(table: Mapping[str, Entry]) -> dict[str, list[str]]:
    """The algorithms that take each flag, in the table's order."""
    found: dict[str, list[str]] = {}
    for name, entry in table.items():
        for flag in entry.flags:
            found.setdefault(flag.name, []).append(name)
    return found
