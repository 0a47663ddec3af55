"""The command line of advise, and what is wrong with one."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from communicators import Link

from sparse_collectives.advise import quantities

LINKS = {
    "1gbit": Link(50e-6, 8e-9),
    "10gbit": Link(30e-6, 0.8e-9),
    "25gbit": Link(15e-6, 0.32e-9),
    "100gbit": Link(5e-6, 0.08e-9),
    "wan": Link(30e-3, 80e-9),
}
"""Usual α and β: Ethernet in one room; wan is 100 Mbit/s and 30 ms between sites."""
DENSITIES = (0.01, 0.001)
MOST_DENSITIES = 16
OPTIMIZERS = ("sgd", "adam", "adamw")

EPILOG = """examples:
  mpiexec -n 8 python -m sparse_collectives.advise --model my_models:resnet50
  torchrun --nproc-per-node 8 -m sparse_collectives.advise --parameters 25e6 --step-seconds 0.25
  python -m sparse_collectives.advise --parameters 25e6 --step-seconds 0.25 --link 10gbit --ranks 32
  python -m sparse_collectives.advise --parameters 25e6 --step-seconds 0.25 --bandwidth 2gbit --latency 80us

FACTORY() returns (model, loss): a torch.nn.Module, and a function without arguments that runs forward on one batch of
yours and returns the loss. It is called with the device as torch's default, so what it makes is already there.
"""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The flags; exits with status 2, and says why, where they make no sense.

    Instead of --bandwidth and --latency they hold `assumed`: the Link that is assumed by any of the flags, or None.
    `chosen`: whether --density was given.
    """
    parser = _parser()
    flags = parser.parse_args(argv)
    if wrong := _wrong(flags):
        parser.error(wrong)
    flags.assumed = LINKS[flags.link] if flags.link else _own_link(flags)
    if flags.assumed:
        flags.ranks = flags.ranks or 32
    flags.chosen = flags.density is not None
    flags.density = sorted(set(flags.density or DENSITIES), reverse=True)
    return flags


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sparse_collectives.advise",
        description="Predicts a training step with every sparse allreduce, and says whether one is worth it.\n"
        "Started by mpiexec or torchrun it measures your ranks; with --link, or --bandwidth and --latency, it assumes "
        "a network.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", metavar="MODULE:FACTORY", help="measure forward and backward of this model")
    what.add_argument(
        "--parameters", type=quantities.parameters, metavar="N", help="trained parameters of your model, such as 25e6"
    )
    add = parser.add_argument
    add(
        "--optimizer",
        choices=OPTIMIZERS,
        default=OPTIMIZERS[0],
        help="yours: what to write, and what is known of accuracy, depends on it (default: sgd, with momentum)",
    )
    add(
        "--step-seconds",
        type=quantities.seconds,
        metavar="T",
        help="forward, backward and update on one rank, no communication",
    )
    add(
        "--density",
        type=quantities.density,
        nargs="+",
        help="of what is sent; default 0.01 0.001; your own are advised whatever is known of accuracy, which is told",
    )
    add("--link", choices=LINKS, help="assume this network instead of measuring")
    add("--bandwidth", type=quantities.bandwidth, metavar="RATE", help="assume one of your own: 1gbit; alone: Gbit/s")
    add("--latency", type=quantities.latency, metavar="TIME", help="of a message, with --bandwidth: 50us; alone: s")
    add("--ranks", type=quantities.ranks, metavar="P", help="of an assumed network: how many, default 32")
    add("--device", help="where gradients are, default cuda where there is one, else cpu")
    add("--no-overlap", action="store_true", help="the exchange comes after backward, not during it")
    add("--json", action="store_true", help="one JSON object instead of text")
    add("--plot", type=Path, metavar="FILE", help="picture of speed-up against bandwidth and ranks")
    return parser


def _wrong(flags: argparse.Namespace) -> str | None:
    """Reason why the flags contradict each other; None if they do not."""
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
        return (
            "--ranks goes with --link, or --bandwidth and --latency; real ranks are started by mpiexec -n P or "
            "torchrun --nproc-per-node P"
        )
    if flags.ranks == 1:
        return "--ranks 1: one rank exchanges nothing; expected 2 or more"
    if flags.density and len(set(flags.density)) > MOST_DENSITIES:
        return f"--density: {len(set(flags.density))} given, expected {MOST_DENSITIES} at most; each takes seconds"
    return None


def _own_link(flags: argparse.Namespace) -> Link | None:
    return None if flags.bandwidth is None else Link(flags.latency, flags.bandwidth)
