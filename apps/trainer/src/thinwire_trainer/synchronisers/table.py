"""Ways of synchronising by name: what makes each, and the flags that it alone takes. One entry is one `--algorithm`.

Imports nothing heavy: flags are checked before torch is loaded, and a maker is found when it is called. So the names
of other packages' algorithms and wires are written here; a test compares them with the packages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from thinwire_trainer.command_line import quantities
from thinwire_trainer.command_line.flag import Flag, Value
from thinwire_trainer.errors import RunError

if TYPE_CHECKING:
    from communicators import Communicator
    from torch import nn

    from thinwire_trainer.command_line.options import Options
    from thinwire_trainer.synchronisers.synchroniser import Rates, Synchroniser

    Make = Callable[[Options, nn.Module, Communicator, Rates], Synchroniser]

OPTIMIZERS = ("sgd", "adamw", "muon")
WITHOUT_MUON = OPTIMIZERS[:2]  # where few entries are sent, and with eager ranks, which nobody has tried it with


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Flags and limits of an `--algorithm`.

    compressors: what --compressor calls it. check: (own values, workers); raises RunError for what does not fit.
    workers: 0 where ranks may come and go.
    elastic: whether they may.
    overlaps: whether its exchange may begin during backward.
    nesterov: whether its momentum is SGD's own, which has this form.
    defaults: of settings of SGD that it has otherwise, by name.
    optimizers: the values of --optimizer that it makes something of.
    needs: the distribution that it comes with, where that may not be installed; imported by the name with "_" for "-".
    """

    flags: Sequence[Flag] = ()
    nesterov: bool = True
    defaults: Mapping[str, float] = field(default_factory=dict)
    optimizers: Sequence[str] = ("sgd",)
    overlaps: bool = False
    compressors: Sequence[str] = ()
    check: Callable[[Mapping[str, Value], int], None] = lambda own, workers: None
    elastic: bool = False
    needs: str = ""

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


def lazily(place: str) -> Callable[..., Any]:
    """The function at "package.module:function", imported when it is called."""
    return lambda *given: resolve_name(place)(*given)


def _check_teams(own: Mapping[str, Value], workers: int) -> None:
    if workers % int(own["teams"]):
        raise RunError(f"--teams {own['teams']} does not divide the {workers} workers into equal teams")


def _check_alpha(own: Mapping[str, Value], workers: int) -> None:
    if own["alpha"] == "auto":
        raise RunError("--alpha auto is for easgd and slowmo: give a number")
    if "fragments" in own and not float(own["alpha"]) < 1:
        raise RunError(f"--alpha {own['alpha']} is too large: streaming-diloco takes 0 <= alpha < 1")


def _check_slow_rate(own: Mapping[str, Value], workers: int) -> None:
    if own["alpha"] != "auto" and not float(own["alpha"]) > 0:
        raise RunError(f"--alpha {own['alpha']} leaves the model as it is: give a number above 0, or auto")


def _check_elasticity(own: Mapping[str, Value], workers: int) -> None:
    most, ranks = 2 / (max(1, workers) + 1), f" with {workers} workers" if workers else ""
    if own["alpha"] != "auto" and not 0 < float(own["alpha"]) < most:
        raise RunError(f"--alpha {own['alpha']} lets ranks and anchor swing apart: give 0 < alpha < {most:.3g}{ranks}")


def _check_threshold(own: Mapping[str, Value], workers: int) -> None:
    if own["select"] == "threshold" and not own["threshold"]:
        raise RunError("--select threshold takes entries from a magnitude on: give it with --threshold")
    if own["threshold"] and own["select"] != "threshold":
        raise RunError(f"--threshold {own['threshold']} has no effect on --select {own['select']}: leave it out")


NONFINITE = Flag(
    "nonfinite",
    "raise",
    "a NaN or inf in a gradient: an error that names rank and parameter, or no step",
    choices=("raise", "skip"),
)
VERIFY = Flag(
    "verify",
    0,
    "compare the ranks' parameters every so many steps, boundaries of averages (which hash all parameters twice a "
    "step, too), or epochs of eager SGD; 0: never",
    read=quantities.count_or_zero,
    metavar="TIMES",
    shapes=False,
)
VALUES = ("fp32", "bf16", "fp16", "int8")
WIRE = Flag(
    "wire",
    "fp32",
    "how values travel, and sparse indices",
    choices=(*VALUES, *(f"{values}-packed" for values in VALUES)),
)
DENSE_WIRE = replace(WIRE, choices=("fp32", "bf16", "fp16"))
DENSITY = Flag("density", 0.01, "share of the gradient that is sent", read=quantities.density)
DENSITY_WARMUP = Flag(
    "density_warmup",
    "0",
    "of which all of the gradient is sent, before the density counts; dgc:STEPS: 25 %%, 6 %%, 1.6 %%, … in them",
    read=quantities.steps_or_stages,
    metavar="STEPS",
)
SELECT = Flag(
    "select",
    "topk",
    "how the entries that are sent are chosen, at most the density's share",
    choices=("topk", "dgc", "gaussiank", "randomk", "threshold"),
)
THRESHOLD = Flag(
    "threshold", 0.0, "the least magnitude that --select threshold takes", read=quantities.non_negative, metavar="T"
)
TEAMS = Flag("teams", 1, "teams of ranks; divide their number", read=quantities.count, metavar="D")
RANK = Flag("rank", 2, "columns of each matrix's two factors", read=quantities.count, metavar="R")
DENSE_STEPS = Flag(
    "dense_steps",
    100,
    "first steps, summed whole; of a short training a tenth",
    read=quantities.count_or_zero,
    metavar="STEPS",
)

INJECT_DELAY = Flag(
    "inject_delay",
    quantities.NO_DELAY,
    "holds ranks up at every step, for experiments: fixed:0,3=0.2, random:2=0.32 (so many, drawn anew) or "
    "linear=0.001 (times the rank)",
    read=quantities.delays,
    metavar="WHOM=SECONDS",
    shapes=False,
)

SYNCHRONOUS = "thinwire_trainer.synchronisers.synchronous"
DENSE = Synchronisation(
    make=lazily(f"{SYNCHRONOUS}:dense"),
    flags=(DENSE_WIRE, NONFINITE, VERIFY, INJECT_DELAY),
    elastic=True,
    compressors=("none",),
    optimizers=OPTIMIZERS,
    overlaps=True,
)
SPARSE = Synchronisation(
    make=lazily(f"{SYNCHRONOUS}:sparse"),
    flags=(DENSITY, DENSITY_WARMUP, WIRE, NONFINITE, VERIFY),
    elastic=True,
    nesterov=False,
    optimizers=WITHOUT_MUON,
    overlaps=True,
)
WHOLE = Synchronisation(
    make=lazily(f"{SYNCHRONOUS}:whole"),
    flags=(NONFINITE, VERIFY),
    elastic=True,
    optimizers=OPTIMIZERS,
    overlaps=True,
)

SYNC_EVERY = Flag("sync_every", 4, "steps between averages", read=quantities.count, metavar="STEPS")
ALPHA = Flag(
    "alpha",
    "auto",
    "how far the model goes (slowmo; auto: 1 - beta), or ranks and anchor pull at each other (auto: 0.9 / ranks)",
    read=quantities.non_negative_or_auto,
)
BETA = Flag("beta", 0.4, "momentum of the anchor", read=quantities.momentum)
BLOCK_MOMENTUM = Flag("block_momentum", "auto", "auto: 1 - 1 / ranks, at most 0.875", read=quantities.momentum_or_auto)
BLOCK_RATE = Flag(
    "block_rate",
    "auto",
    "of what a block of steps changed; auto: 1 - block momentum",
    read=quantities.or_auto(quantities.positive),
)
OUTER = (
    Flag("outer_rate", 0.7, "of the outer SGD", read=quantities.positive),
    Flag("outer_momentum", 0.9, "of the outer SGD, Nesterov's", read=quantities.momentum),
)
COMPRESS = Flag(
    "compress",
    "none",
    "the change since the last agreed model travels in so many bits, what is rounded off later",
    choices=("none", "int8", "int4", "int2"),
)
DECAY = Flag("decay", 0.95, "factor on the residual, each block", read=quantities.momentum)
TOPK = Flag("topk", 32, "coefficients that are sent of each block", read=quantities.count)
CHUNK = Flag("chunk", 64, "most rows and columns of a block, 181 at most", read=quantities.chunk)
FRAGMENTS = Flag("fragments", 4, "that travel one after another", read=quantities.count)
DELAY = Flag("delay", 1, "between a fragment's launch and its use", read=quantities.count_or_zero, metavar="STEPS")
PERIODIC = Synchronisation(
    make=lazily("thinwire_trainer.synchronisers.periodic:periodic"),
    flags=(),
    elastic=True,
    optimizers=OPTIMIZERS,
)

AVERAGING: dict[str, dict[str, Any]] = {
    "local-sgd": {"flags": (SYNC_EVERY, COMPRESS)},
    "bmuf": {"flags": (SYNC_EVERY, BLOCK_RATE, BLOCK_MOMENTUM)},
    "slowmo": {"flags": (SYNC_EVERY, ALPHA, BETA), "check": _check_slow_rate},
    "easgd": {"flags": (SYNC_EVERY, ALPHA), "check": _check_elasticity},
    "cocod": {"flags": (SYNC_EVERY,)},
    "overlap-local-sgd": {
        "flags": (replace(SYNC_EVERY, default=2), replace(ALPHA, default=0.6), replace(BETA, default=0.7)),
        "check": _check_alpha,
    },
    "diloco": {"flags": (replace(SYNC_EVERY, default=20), *OUTER, COMPRESS)},
    "sparseloco": {
        "flags": (
            replace(SYNC_EVERY, default=15),
            replace(DENSITY, default=1 / 64, says="share of each 4,096 elements that is sent, in 2 bits"),
            DECAY,
        )
    },
    "demo": {
        "flags": (
            replace(SYNC_EVERY, default=1),
            TOPK,
            CHUNK,
            replace(DECAY, default=0.999, says="factor on the momentum, each step"),
        ),
        "nesterov": False,
        "optimizers": ("sgd",),
        "defaults": {"lr": 0.001, "momentum": 0.0},
    },
    "streaming-diloco": {
        "flags": (replace(SYNC_EVERY, default=20), replace(ALPHA, default=0.5), *OUTER, COMPRESS, FRAGMENTS, DELAY),
        "check": _check_alpha,
    },
}
"""The algorithms of local-sgd, with the flags of each."""

SELECTING = replace(SPARSE, flags=(SELECT, THRESHOLD, *SPARSE.flags), check=_check_threshold)
"""Where the algorithm leaves it to others what is selected."""


def _grace(text: str) -> str:
    """Seconds, or a share such as 0.5x."""
    quantities.non_negative(text.removesuffix("x"))
    return text


def _check_quorum(own: Mapping[str, Value], workers: int) -> None:
    if own["quorum"] != "auto" and int(own["quorum"]) > workers:
        raise RunError(f"--quorum {own['quorum']} is more than the {workers} workers")


EAGER = Synchronisation(
    make=lazily("thinwire_trainer.synchronisers.eager:eager"),
    flags=(
        Flag(
            "grace",
            "0",
            "that a round waits for more ranks once its quorum is there; 0.5x: half of the median round",
            read=_grace,
            metavar="SECONDS",
        ),
        Flag(
            "max_staleness",
            8,
            "in a row that a rank may miss; then they wait for it",
            read=quantities.count_or_zero,
            metavar="ROUNDS",
        ),
        INJECT_DELAY,
        VERIFY,
    ),
    optimizers=WITHOUT_MUON,
    defaults={"nesterov": True},  # late gradients act like more momentum
)
QUORUM = Flag(
    "quorum",
    "auto",
    "with so many a round begins; auto: half of them",
    read=quantities.or_auto(quantities.count),
    metavar="RANKS",
)

TABLE: dict[str, Synchronisation] = {
    "dense": DENSE,
    "topk-allgather": replace(SELECTING, compressors=("topk", "topkA")),
    "topk-dsa": replace(SELECTING, compressors=("topkDSA",)),
    "gtopk": replace(SELECTING, compressors=("gtopk",)),
    "oktopk": replace(SPARSE, compressors=("oktopk",)),
    "spardl": replace(SPARSE, compressors=("spardl",), flags=(TEAMS, *SPARSE.flags), check=_check_teams),
    "powersgd": replace(WHOLE, flags=(RANK, DENSE_STEPS, *WHOLE.flags)),
    "dense-int8": WHOLE,
    **{name: replace(PERIODIC, **{**own, "flags": (*own["flags"], VERIFY)}) for name, own in AVERAGING.items()},
    "eager-solo": EAGER,
    "eager-majority": EAGER,
    "eager-quorum": replace(EAGER, flags=(QUORUM, *EAGER.flags), check=_check_quorum),
}


AUTO = "auto"
CHOOSING = Entry(flags=SPARSE.flags, nesterov=False, optimizers=WITHOUT_MUON, overlaps=True)
"""What `AUTO` takes: the flags that all it may choose share. What it chooses is in the `TABLE`, and makes itself."""


def owners(table: Mapping[str, Entry]) -> dict[str, list[str]]:
    """The algorithms that take each flag, in the table's order."""
    found: dict[str, list[str]] = {}
    for name, entry in table.items():
        for flag in entry.flags:
            found.setdefault(flag.name, []).append(name)
    return found
