"""The command line of advise, and what is wrong with one."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from communicators import Link

LINKS = {
    "1gbit": Link(50e-6, 8e-9),
    "10gbit": Link(30e-6, 0.8e-9),
    "25gbit": Link(15e-6, 0.32e-9),
    "100gbit": Link(5e-6, 0.08e-9),
    "wan": Link(30e-3, 80e-9),
}
"""Usual α and β: Ethernet in one room; wan is 100 Mbit/s and 30 ms between sites."""

EPILOG = """examples:
  mpiexec -n 8 python -m sparse_collectives.advise --model my_models:resnet50
  torchrun --nproc-per-node 8 -m sparse_collectives.advise --parameters 25e6 --step-seconds 0.25
  python -m sparse_collectives.advise --parameters 25e6 --step-seconds 0.25 --link 10gbit --ranks 32

FACTORY() returns (model, loss): a torch.nn.Module, and a function without arguments that runs forward on one batch of
yours and returns the loss. It is called with the device as torch's default, so what it makes is already there.
"""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The flags; exits with status 2, and says why, where they make no sense."""
    parser = argparse.ArgumentParser(
        prog="python -m sparse_collectives.advise",
        description="Predicts a training step with every sparse allreduce, and says whether one is worth it.\n"
        "Started by mpiexec or torchrun it measures your ranks; with --link it assumes a network.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", metavar="MODULE:FACTORY", help="measure forward and backward of this model")
    what.add_argument("--parameters", type=_count, metavar="N", help="trained parameters of your model, such as 25e6")
    parser.add_argument(
        "--step-seconds", type=_positive, metavar="T", help="forward, backward and update on one rank, no communication"
    )
    parser.add_argument(
        "--density", type=_density, nargs="+", default=[0.01, 0.001], help="of what is sent; default 0.01 0.001"
    )
    parser.add_argument("--link", choices=LINKS, help="assume this network instead of measuring")
    parser.add_argument("--ranks", type=_count, metavar="P", help="with --link: how many, default 32")
    parser.add_argument("--device", help="where gradients are, default cuda where there is one, else cpu")
    parser.add_argument("--no-overlap", action="store_true", help="the exchange comes after backward, not during it")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="picture of speed-up against bandwidth and ranks")
    flags = parser.parse_args(argv)
    if flags.parameters and not flags.step_seconds:
        parser.error("--parameters needs --step-seconds T: what a step takes on one rank without communication")
    if flags.model and flags.step_seconds:
        parser.error("--step-seconds is measured where --model is given: leave it out")
    if flags.model and not all(flags.model.partition(":")):
        parser.error(f"--model {flags.model}: expected MODULE:FACTORY, such as my_models:resnet50")
    if flags.ranks and not flags.link:
        parser.error("--ranks goes with --link; real ranks are started by mpiexec -n P or torchrun --nproc-per-node P")
    if flags.link:
        flags.ranks = flags.ranks or 32
        if flags.ranks < 2:
            parser.error("--ranks 1: one rank exchanges nothing; expected 2 or more")
    flags.density = sorted(set(flags.density), reverse=True)
    return flags


def _count(text: str) -> int:
    value = float(text)
    if value < 1 or value != int(value):
        raise argparse.ArgumentTypeError(f"{text} given, expected a whole number of 1 or more")
    return int(value)


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} given, expected seconds > 0")
    return value


def _density(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} given, expected 0 < density <= 1")
    return value
