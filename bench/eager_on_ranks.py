"""The digits of `bench.eager_tasks` on real ranks behind an emulated link, one of which is held up in every step.

Eight gloo ranks, each a process with the engine that every user has. A step sleeps instead of computing for long, and
the rank that is drawn for it longer, in the proportion of Eager-SGD's evaluation (0.32 s more than 0.5 s), at a fifth
of its seconds: so eight fit on two cores. The same steps in a simulated world with the same link say what to expect.
Ways take turns, a part of the steps each; whole_speedup: by the seconds of all steps, on the slowest rank.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from communicators import Communicator, Link, SimulatedWorld, barrier
from partial_collectives import EagerSGD, injected_delays
from slow_link import open_link
from slow_link.throttled import behind_link
from sparse_collectives.prediction import slowest

from bench.eager_tasks import Digits
from bench.real_ranks import found_by, tell
from bench.record import told, with_quantiles

RANKS, MBIT, MS = 8, 100.0, 1.0
STEP, LATE = 0.1, 0.064  # seconds
TURNS = 4
SHOWN = ("how", "P", "whole", "whole_speedup", "expected_speedup", "ideal", "accuracy")
WAYS: dict[str, Any] = {"synchronous": RANKS, "majority": "majority", "solo": "solo"}


def on_ranks(steps: int) -> list[dict[str, Any]]:
    """A row for each way; steps: of each."""
    with open_link(ranks=RANKS, mbit_per_second=MBIT, milliseconds=MS) as link:
        rows = found_by(link, _on_rank, steps, mpi=False)
    expected = _simulated(steps)
    for row in rows:
        row |= {"expected_speedup": expected["synchronous"] / expected[row["how"]], "ideal": _ideal(steps)}
        row["link"] = f"{MBIT:g} Mbit/s and {MS:g} ms"
    return [{**with_quantiles(row), **row} for row in told(rows, SHOWN)]


def _on_rank(steps: int) -> None:
    comm = behind_link()
    taken, accuracies = _trained(comm, steps, time.sleep)
    if comm.rank == 0:
        whole = {how: sum(turns) for how, turns in taken.items()}
        for how, turns in taken.items():
            row = {"how": how, "P": comm.size, "steps": steps, "whole": whole[how], "turn_samples": turns}
            tell({**row, "whole_speedup": whole["synchronous"] / whole[how], "accuracy": accuracies[how]})


def _simulated(steps: int) -> dict[str, float]:
    """Virtual seconds of each way."""
    world = SimulatedWorld(RANKS, link=Link(1e-3 * MS, 8e-6 / MBIT))
    taken, _ = world.run(lambda comm: _trained(comm, steps, comm.elapse))[0]
    return {how: sum(turns) for how, turns in taken.items()}


def _trained(
    comm: Communicator, steps: int, pass_time: Callable[[float], None]
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """The slowest rank's seconds of every turn, and the accuracy at the end, by way."""
    task, late = Digits(), injected_delays(f"random:1={LATE}", comm.rank, comm.size)
    taken: dict[str, list[float]] = {how: [] for how in WAYS}
    models = {how: _model(task) for how in WAYS}
    inner = {how: torch.optim.SGD(model.parameters(), lr=task.rate, momentum=0.9) for how, model in models.items()}
    for turn in range(TURNS):
        for how, quorum in WAYS.items():
            with EagerSGD(inner[how], models[how].named_parameters(), comm=comm, quorum=quorum) as eager:
                barrier(comm)
                began = comm.clock()
                for step in range(turn * steps // TURNS, (turn + 1) * steps // TURNS):
                    pass_time(STEP + late(step))
                    eager.zero_grad()
                    task.loss(models[how], 0, comm.rank, step).backward()  # type: ignore[no-untyped-call]
                    eager.step()
                own = comm.clock() - began
            taken[how] += slowest([own], comm)
    return taken, {how: task.accuracy(model) for how, model in models.items()}


def _model(task: Digits) -> torch.nn.Module:
    torch.manual_seed(0)
    return task.model()


def _ideal(steps: int) -> float:
    """If every rank went on at its own mean pace."""
    late = [injected_delays(f"random:1={LATE}", rank, RANKS) for rank in range(RANKS)]
    whole = sum(STEP + max(each(step) for each in late) for step in range(steps))
    return float(whole / max(sum(STEP + each(step) for step in range(steps)) for each in late))
