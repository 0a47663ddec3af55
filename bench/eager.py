"""Time to the same accuracy under imbalance that is fixed in advance: eager SGD against synchronous SGD.

    python -m bench eager [--seeds N] [--full] [--output DIR]

Sixteen simulated ranks train a small network on scikit-learn's digits, 1,437 to train with and 360 to test. A step
computes for 0.5 s, and on one rank, drawn anew in each step, for 0.32 s more, about as in Eager-SGD's evaluation (there
two of 64). seconds: virtual, until the test accuracy first reaches 95 %, looked at every 5 rounds. whole: until all
ranks have made all steps. speed-ups: against synchronous; "ideal": the bound for this imbalance, if every rank went on
at its own mean pace. accuracy: at the end, where all have been as often through the data. Medians of the seeds.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch
from communicators import Communicator, SimulatedWorld
from partial_collectives import EagerSGD, injected_delays
from partial_collectives.protocol.rules import Quorum
from sklearn.datasets import load_digits
from torch import Tensor, nn

from bench.record import machine, record

RANKS = 16
COMPUTE_SECONDS, DELAY = 0.5, "random:1=0.32"
IDEAL = (COMPUTE_SECONDS + 0.32) / (COMPUTE_SECONDS + 0.32 / RANKS)
TARGET = 0.95
BATCH, STEPS = 8, 200  # 18 epochs
WAYS: dict[str, Quorum] = {"synchronous": RANKS, "majority": "majority", "8 of 16": 8, "solo": "solo"}


def main(argv: Sequence[str] = ()) -> int:
    """Trains, prints the table; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench eager", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, help="default 1, with --full 3")
    parser.add_argument("--full", action="store_true", help="the numbers to report")
    parser.add_argument("--output", type=Path, metavar="DIR", help="write DIR/eager.csv, .json and .png too")
    options, facts = parser.parse_args(argv), machine()
    seeds = options.seeds or (3 if options.full else 1)
    rows: list[dict[str, float | str]] = []
    first: list[float] = []
    for how, quorum in WAYS.items():
        runs = [_trained(quorum, seed) for seed in range(seeds)]
        reached, whole, accuracy, rounds = (statistics.median(column) for column in zip(*runs, strict=True))
        first = first or [reached, whole]
        row = {"seconds": reached, "speedup": first[0] / reached, "whole": whole, "whole_speedup": first[1] / whole}
        rows.append({"how": how, **row, "accuracy": accuracy, "rounds": rounds})
        print(
            f"{how:>12}: {reached:6.1f} s to {TARGET:.0%}, speed-up {first[0] / reached:.2f}; {whole:6.1f} s in all, "
            f"{first[1] / whole:.2f} (ideal {IDEAL:.2f}); {rounds:.0f} rounds; final {accuracy:.1%}",
            flush=True,
        )
    if options.output:
        record(options.output, "eager", rows, labels=("how",), values=("speedup", "whole_speedup"), facts=facts)
    return 0


def _trained(quorum: Quorum, seed: int) -> tuple[float, float, float, int]:
    """(virtual seconds to the target, of the whole, accuracy at the end, rounds), on rank 0."""
    inputs, labels = _digits(seed)
    return SimulatedWorld(RANKS, seed=seed).run(lambda comm: _on_rank(comm, quorum, seed, inputs, labels))[0]


def _on_rank(
    comm: Communicator, quorum: Quorum, seed: int, inputs: Tensor, labels: Tensor
) -> tuple[float, float, float, int]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    delay = injected_delays(DELAY, comm.rank, comm.size, seed=seed)
    draw = torch.Generator().manual_seed(1000 * seed + comm.rank)
    reached, seen = float("inf"), 0
    optimizer = EagerSGD(inner, model.named_parameters(), comm=comm, quorum=quorum, seed=seed)
    with optimizer:
        for step in range(STEPS):
            comm.elapse(COMPUTE_SECONDS + delay(step))
            batch = torch.randint(1437, (BATCH,), generator=draw)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs[batch]), labels[batch])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if comm.rank == 0 and reached == float("inf") and optimizer.applied >= seen + 5:
                seen = optimizer.applied
                reached = comm.clock() if _accuracy(model, inputs, labels) >= TARGET else reached
    return reached, comm.clock(), _accuracy(model, inputs, labels), optimizer.applied


def _accuracy(model: nn.Module, inputs: Tensor, labels: Tensor) -> float:
    with torch.no_grad():
        return float((model(inputs[1437:]).argmax(1) == labels[1437:]).float().mean())


def _digits(seed: int) -> tuple[Tensor, Tensor]:
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    return torch.tensor(images, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]


if __name__ == "__main__":
    raise SystemExit(main())
