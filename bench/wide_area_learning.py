"""How well unequal machines learn a text together, beside equal ones that never wait or die, at the same tokens.

    python -m bench wide-area-learning [--ranks P] [--steps N] [--seeds N] [--full] [--output DIR]

Machines, troubles and ways are those of `bench wide-area-day`, but that a machine dies every 50 hours, so that some do
within the run. An LSTM on the text of Python's own help stands for that benchmark's model: rates are as much lower as
it is smaller, and a step of 125 s for 25 of those, so that rounds wait five times as long for who does not answer. A
training ends when all machines together have taken P·N steps; then the loss of a held-out character, in nats, of the
model that all have. "equal": the same way over machines of one speed without links, troubles or deaths; ratio: loss
over that of equal `DiLoCo`.
"""

import math
import statistics
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from communicators import Elastic, LeftOutError, SimulatedWorld
from communicators.elastic import membership, transfer
from communicators.simulated.world import SimulatedCommunicator
from slow_link import Port
from slow_link.simulated import paths_of
from torch import nn

from bench.convergence.tasks import LENGTH, LSTMLM, TASKS, characters
from bench.elastic_cluster import Life
from bench.record import asked, parser_of, record
from bench.troubles import Troubles, untold
from bench.wide_area_day import PARAMETERS, WAYS, Machine, Way, drawn

EVERY, STANDS_FOR, BATCH, RATE, PATIENCE = 20, 25, 4, 1e-2, 4 * 3600.0
TROUBLES = Troubles(death_every=50 * 3600.0)
CALM = Troubles(jitter=0.0, hang_share=0.0, slow_every=math.inf)
EQUAL = Machine(Port(up=1e5, down=1e5, delay=0.0), 1.0, Life(0.0, math.inf, dark=False), CALM)
SHOWN = ("way", "machines", "loss", "least", "most", "ratio", "deaths")


@dataclass
class Run:
    """Steps that all machines of a training take together, and what they tell."""

    ranks: int
    left: int
    loss: float = math.nan


def main(argv: Sequence[str] = ()) -> None:
    """Trains, prints the table."""
    parser = parser_of("wide-area-learning", __doc__, full="3 seeds")
    parser.add_argument("--ranks", type=int, default=16, help="default 16")
    parser.add_argument("--steps", type=int, help="of each machine in the mean; default 100, with --full 400")
    parser.add_argument("--seeds", type=int, help="default 1, with --full 3")
    options = asked(parser, argv, steps=(100, 400), seeds=(1, 3))
    record(options, _rows(options), labels=("way", "machines"), values=("loss",), against="equal `DiLoCo`", shown=SHOWN)


def _rows(options: Any) -> list[dict[str, Any]]:
    rows = [_row("DiLoCo", "equal", options), *(_row(way, "unequal", options) for way in WAYS)]
    return [{**row, "ratio": row["loss"] / rows[0]["loss"]} for row in rows]


def _row(way: str, machines: str, options: Any) -> dict[str, Any]:
    found = []
    for seed in range(options.seeds):
        those = [EQUAL] * options.ranks
        if machines == "unequal":
            those = drawn(options.ranks, 2 * options.steps * STANDS_FOR * TROUBLES.step, seed, TROUBLES)
        found.append(trained(WAYS[way], those, options.ranks, options.steps, seed))
    losses, deaths = zip(*found, strict=True)
    spread = {"loss": statistics.mean(losses), "least": min(losses), "most": max(losses), "loss_samples": losses}
    return {"way": way, "machines": machines, **spread, "deaths": sum(deaths)}


def trained(way: Way, machines: Sequence[Machine], ranks: int, steps: int, seed: int) -> tuple[float, int]:
    """Loss of these machines, and how many of them have died."""
    run, smaller = Run(ranks, ranks * steps), PARAMETERS / sum(p.numel() for p in LSTMLM().parameters())
    ports = [replace(each.port, up=each.port.up / smaller, down=each.port.down / smaller) for each in machines]
    faults = [fault for place, each in enumerate(machines) for fault in each.faults(place)]
    world = SimulatedWorld(len(machines), paths_of(ports), seed=seed, faults=faults)
    chunks = patch.object(transfer, "CHUNK_BYTES", 2048)  # behind which small messages wait
    with untold(), chunks, patch.object(membership, "POLL_SECONDS", 1.0):
        world.run(partial(_on_rank, way=way, run=run, machines=machines, seed=seed))
    return run.loss, sum(each.life.dies < world.elapsed for each in machines)


def _on_rank(comm: SimulatedCommunicator, way: Way, run: Run, machines: Sequence[Machine], seed: int) -> None:
    """Trains until all have taken their steps together, or the machine dies; joins anew where it was left out."""
    machine, draw = machines[comm.rank], np.random.default_rng((seed, comm.rank))
    seconds = machine.seconds(STANDS_FOR, draw)
    comm.elapse(machine.life.begins)
    while run.left > 0 and comm.clock() < machine.life.dies:
        with suppress(LeftOutError, TimeoutError):
            world = Elastic(comm, start_with=run.ranks, at_least=2, timeout=max(way.timeout, 600.0), patience=PATIENCE)
            torch.manual_seed(seed)
            model = LSTMLM()
            inner = torch.optim.AdamW(model.parameters(), lr=RATE)
            optimizer = way.optimizer(model, inner, EVERY, world)
            while run.left > 0 and comm.clock() < machine.life.dies:
                run.left -= 1
                comm.elapse(seconds(comm.clock()))
                _step(model, draw)
                optimizer.step()
                optimizer.average()
            if comm.clock() < machine.life.dies:
                optimizer.finish()
                run.loss = math.log(TASKS["lstm-text"].score(model)) if math.isnan(run.loss) else run.loss
    while math.isnan(run.loss):
        comm.elapse(60.0)  # the dead say nothing


def _step(model: nn.Module, draw: np.random.Generator) -> None:
    """Gradient of a batch of this machine's own."""
    text = characters()[0]
    starts = draw.integers(0, len(text) - LENGTH - 1, BATCH)
    inputs = torch.stack([text[at : at + LENGTH] for at in starts])
    targets = torch.stack([text[at + 1 : at + LENGTH + 1] for at in starts])
    model.zero_grad()
    nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
