"""Predicts a training step with every way to exchange, and says whether one is worth it.

Started by mpiexec or torchrun it measures your ranks; with --link, or --bandwidth and --latency, it assumes a network.

Examples:
  mpiexec -n 8 python -m thinwire advise --model my_models:resnet50
  torchrun --nproc-per-node 8 -m thinwire advise --parameters 25e6 --step-seconds 0.25
  thinwire advise --parameters 25e6 --step-seconds 0.25 --link 10gbit --ranks 32
  thinwire advise --parameters 25e6 --step-seconds 0.25 --bandwidth 2gbit --latency 80us
  thinwire advise --parameters 25e6 --step-seconds 0.25 --link 10gbit --stragglers 5%:300ms 0.1%:10s

FACTORY() returns (model, loss): a torch.nn.Module, and a function without arguments that runs forward on one batch of
yours and returns the loss. It is called with the device as torch's default, so what it makes is already there.
"""

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from communicators import Communicator, Link

from thinwire.advice.accuracy import DATA
from thinwire.advice.measuring import NoAdvice, Trained, device_of, find_out, join, measured_model, on_every_rank
from thinwire.advice.recommendation import OPTIMIZERS
from thinwire.advice.report import as_json, as_text, check_plot, plot
from thinwire.advice.situation import DENSITIES, LINKS, MOST_RANKS, Situation
from thinwire.advice.stragglers import Stragglers

MOST_DENSITIES = 16
COMMAND = "thinwire advise"
Units = Mapping[str, float]
Parsed = Callable[[str], float]
ALONE = {"": 1.0}
BITS = {"": 1.0, "kbit": 1e-6, "mbit": 1e-3, "gbit": 1.0, "tbit": 1e3}
RATES = BITS | {f"{unit}/s": scale for unit, scale in BITS.items()}
TIMES = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}


def quantity(expected: str, least: float, most: float, *, units: Units = ALONE, whole: bool = False) -> Parsed:
    """Type of a flag: a number with one of `units`, by which it is multiplied, from `least` to `most`."""

    def parsed(text: str) -> float:
        lowered = text.strip().lower()
        number = lowered.rstrip(ascii_lowercase + "µ/%")
        try:
            value = float(number) * units[lowered.removeprefix(number)]
        except (ValueError, KeyError):
            value = math.nan
        if not least <= value <= most or (whole and value % 1):
            raise argparse.ArgumentTypeError(f"{text} given, expected {expected}")
        return int(value) if whole else value

    return parsed


SHARES = {"": 1.0, "%": 0.01}
SHARE = quantity("0 < share <= 1, such as 5% or 0.05", sys.float_info.min, 1, units=SHARES)
DELAY = quantity("seconds > 0, a time such as 300ms", sys.float_info.min, sys.float_info.max, units=TIMES)
MEASURED = "measured"


def late(text: str) -> tuple[float, float] | str:
    """Type of --stragglers: (seconds, share of the steps), or `MEASURED`."""
    share, colon, seconds = text.partition(":")
    if text == MEASURED:
        return MEASURED
    if not colon:
        raise argparse.ArgumentTypeError(f"{text} given, expected SHARE:TIME such as 5%:300ms, or {MEASURED}")
    return DELAY(seconds), SHARE(share)


PARAMETERS = quantity("a whole number of 1 or more, 10,000,000,000,000 at most", 1, 10**13, whole=True)
RANKS = quantity(f"2 or more, {MOST_RANKS:,} at most: one rank exchanges nothing", 2, MOST_RANKS, whole=True)
STEP_SECONDS = quantity("seconds > 0, a time such as 250ms", sys.float_info.min, sys.float_info.max, units=TIMES)
DENSITY = quantity(
    "0 < density < 1, such as 1% or 0.01: at 1 nothing is selected",
    sys.float_info.min,
    math.nextafter(1, 0),
    units=SHARES,
)
BANDWIDTH = quantity("1kbit to 100tbit, a rate such as 1gbit (a number alone is Gbit/s)", 1e-6, 1e5, units=RATES)
LATENCY = quantity("0 to 60 s, a time such as 50us or 30ms (a number alone is seconds)", 0, 60, units=TIMES)

FLAGS: dict[str, dict[str, Any]] = {
    "--model": {"metavar": "MODULE:FACTORY", "help": "measure forward and backward of this model"},
    "--parameters": {"type": PARAMETERS, "metavar": "N", "help": "trained parameters of your model, such as 25e6"},
    "--step-seconds": {"type": STEP_SECONDS, "metavar": "T", "help": "of a step on one rank, without communication"},
    "--optimizer": {"choices": OPTIMIZERS, "default": "sgd", "help": "yours; the advice depends on it (default: sgd)"},
    "--data": {
        "choices": (*filter(None, DATA), "all"),
        "help": "judge ways by trainings on such data, of such models (default: by the layers of --model, or all)",
    },
    "--density": {
        "type": DENSITY,
        "nargs": "+",
        "help": "share that is sent, default 0.01 0.001; yours are advised if faster, even if they learn worse",
    },
    "--link": {"choices": LINKS, "help": "assume this network instead of measuring"},
    "--bandwidth": {"type": BANDWIDTH, "metavar": "RATE", "help": "assume one of your own: 1gbit; alone: Gbit/s"},
    "--latency": {"type": LATENCY, "metavar": "TIME", "help": "of a message, with --bandwidth: 50us; alone: s"},
    "--ranks": {"type": RANKS, "metavar": "P", "help": "of an assumed network: how many, default 32"},
    "--stragglers": {
        "type": late,
        "metavar": "SHARE:TIME",
        "nargs": "+",
        "action": "extend",
        "help": "in a share of its steps each rank is so late, such as 5%%:300ms; or, with --model: measured",
    },
    "--device": {"help": "where gradients are, default cuda where there is one, else cpu"},
    "--no-overlap": {"action": "store_true", "help": "the exchange comes after backward, not during it"},
    "--json": {"action": "store_true", "help": "one JSON object instead of text"},
    "--plot": {"type": Path, "metavar": "FILE", "help": "picture of speed-up against bandwidth and ranks"},
}


def main(argv: Sequence[str]) -> int:
    """Prints the advice on rank 0; returns the exit status, 2 where flags or surroundings make no sense."""
    flags, comm = parse(argv), None
    try:
        comm = join(flags.assumed)
        _advise(flags, comm)
    except NoAdvice as reason:
        if comm is None or comm.rank == 0:
            _say(str(reason))
        return 2
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The flags; exits with status 2, and says why, where they make no sense.

    assumed: the Link that is assumed by any of them, or None. late: the Stragglers that are, or None. chosen: whether
    --density was given.
    """
    parser = _parser()
    flags = parser.parse_args(argv)
    flags.chosen = flags.density is not None
    flags.density = sorted(set(flags.density or DENSITIES), reverse=True)
    if wrong := _contradiction(flags):
        parser.error(wrong)
    own = None if flags.bandwidth is None else Link(flags.latency, 8e-9 / flags.bandwidth)
    flags.assumed = LINKS.get(flags.link, own)
    flags.ranks = flags.ranks or (32 if flags.assumed else None)
    told = flags.stragglers if flags.stragglers not in (None, [MEASURED]) else []
    late = {seconds: math.fsum(share for other, share in told if other == seconds) for seconds, _ in told}
    try:
        flags.late = Stragglers.told(late) if late else None
    except ValueError as wrong:
        parser.error(f"--stragglers: {wrong}")
    return flags


def _parser() -> argparse.ArgumentParser:
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__, formatter_class=shape)
    training = parser.add_mutually_exclusive_group(required=True)
    for flag, settings in FLAGS.items():
        group = training if flag in ("--model", "--parameters") else parser
        group.add_argument(flag, **settings)
    return parser


def _contradiction(flags: argparse.Namespace) -> str:
    """Reason why the flags do not go together; "" if they do."""
    own = flags.bandwidth is not None, flags.latency is not None
    if flags.parameters and not flags.step_seconds:
        return "--parameters needs --step-seconds T: what a step takes on one rank without communication"
    if flags.model and flags.step_seconds:
        return "--step-seconds is measured where --model is given: leave it out"
    if flags.model and not all(flags.model.partition(":")):
        return f"--model {flags.model}: expected MODULE:FACTORY, such as my_models:resnet50"
    if flags.link and any(own):
        return "--link stands for a bandwidth and a latency: give it, or --bandwidth and --latency"
    if any(own) and not all(own):
        return "--bandwidth and --latency go together: give both, such as --bandwidth 1gbit --latency 50us"
    if flags.ranks and not flags.link and not any(own):
        real = "real ranks are started by mpiexec -n P or torchrun --nproc-per-node P"
        return f"--ranks goes with --link, or --bandwidth and --latency; {real}"
    if flags.stragglers and MEASURED in flags.stragglers and (len(flags.stragglers) > 1 or not flags.model):
        return f"--stragglers {MEASURED} stands alone, and needs --model: the steps of this are measured"
    if flags.chosen and flags.optimizer == "muon":
        return "--density is of a selection, and nothing is selected for muon: leave it out"
    if len(flags.density) > MOST_DENSITIES:
        return f"--density: {len(flags.density)} given, expected {MOST_DENSITIES} at most; each takes seconds"
    return ""


def _advise(flags: argparse.Namespace, comm: Communicator) -> None:
    """Prints the advice on stdout and reports progress on stderr. Raises NoAdvice."""
    if flags.plot:
        on_every_rank(lambda: check_plot(flags.plot) if comm.rank == 0 else None, comm)
    situation = _situation(flags, comm, _say if comm.rank == 0 else lambda _: None)
    if comm.rank != 0:
        return
    _say(f"predicting steps of {situation.ranks} ranks")
    print(as_json(situation) if flags.json else as_text(situation))
    if flags.plot:
        _say(f"drawing {flags.plot}")
        plot(situation, flags.plot)


def _situation(flags: argparse.Namespace, comm: Communicator, say: Callable[[str], None]) -> Situation:
    device = on_every_rank(lambda: device_of(flags.device, comm), comm)
    if flags.model:
        say(f"measuring forward and backward of {flags.model}")
        trained = measured_model(flags.model, comm, device, late=flags.stragglers == [MEASURED])
    else:
        trained = Trained.of_numbers(flags.parameters, flags.step_seconds)
    return find_out(
        trained,
        comm,
        say,
        device=device,
        ranks=flags.ranks or comm.size,
        densities=flags.density,
        link=flags.assumed,
        link_name=flags.link or "given",
        overlap=not flags.no_overlap,
        stragglers=flags.late,
        optimizer=flags.optimizer,
        chosen=flags.chosen,
        data=trained.data if flags.data is None else flags.data.replace("all", ""),
    )


def _say(text: str) -> None:
    print(f"{COMMAND}: {text}", file=sys.stderr, flush=True)
