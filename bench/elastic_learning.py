"""How well a training learns in which ranks die and others join, beside one in which nobody does.

    python -m bench elastic-learning [--tasks digits text] [--seeds N] [--full] [--output DIR]

Eight simulated ranks; 20 times one of them dies, at a random moment, and another one joins soon after. By
`DistributedOptimizer` (gTop-k at 1 %, SGD with momentum), `UpdateOptimizer` (the same, Adam), `LocalSGD` and `DiLoCo`.
digits: a perceptron on scikit-learn's, accuracy on the test images. text: a small LSTM on the text of Python's
own help, one epoch, loss of a held-out character in nats. score: mean, least and most of the seeds. The dead take along
the gradients and residuals that they hold.
"""

import logging
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from communicators import Communicator, Dies, Elastic, SimulatedWorld
from data_parallel import DistributedOptimizer, UpdateOptimizer
from local_sgd import DiLoCo, LocalSGD
from torch import Tensor, nn

from bench.convergence.tasks import LENGTH, LSTMLM, TASKS, characters, digits
from bench.eager_tasks import Digits
from bench.record import asked, parser_of, record

PERCEPTRON = Digits()
RANKS, DEATHS, STEP_SECONDS = 8, 20, 0.01
LABELS = ("task", "way", "deaths")
Samples = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Task:
    """What is learnt. samples: (inputs, labels) to train on. rates: learning rate of each way that it is learnt by."""

    model: Callable[[], nn.Module]
    samples: Callable[[], Samples]
    score: Callable[[nn.Module], float]
    epochs: int
    batch: int
    rates: dict[str, float]


def _windows() -> Samples:
    """Stretches of text, and the same one character later."""
    text = characters()[0]
    return [(text[at : at + LENGTH], text[at + 1 : at + LENGTH + 1]) for at in range(0, len(text) - LENGTH, LENGTH)]


def _text_loss(model: nn.Module) -> float:
    return math.log(TASKS["lstm-text"].score(model))


LEARNT = {
    "digits": Task(
        *(PERCEPTRON.model, lambda: list(zip(*digits()[:2], strict=True)), PERCEPTRON.accuracy, 30, 64),
        {"gradients": 0.1, "updates": 2e-3, "local-sgd": 0.1, "diloco": 2e-3},
    ),
    "text": Task(*(LSTMLM, _windows, _text_loss, 1, 32), {"gradients": 1.0, "updates": 1e-2, "diloco": 1e-2}),
}


def main(argv: Sequence[str] = ()) -> None:
    """Trains, prints the table."""
    parser = parser_of("elastic-learning", __doc__, full="5 seeds")
    parser.add_argument("--seeds", type=int, help="default 2, with --full 5")
    parser.add_argument("--tasks", nargs="+", choices=list(LEARNT), default=list(LEARNT), help="default all")
    options = asked(parser, argv, seeds=(2, 5))
    logging.getLogger("communicators.elastic").setLevel(logging.ERROR)  # of each death and newcomer, on every rank
    cases = [(task, way, deaths) for task in options.tasks for way in LEARNT[task].rates for deaths in (0, DEATHS)]
    rows, shown = (_row(*case, options.seeds) for case in cases), (*LABELS, "score", "least", "most")
    record(options, rows, labels=LABELS, values=("score",), against="the same without deaths", shown=shown)


def _row(task: str, way: str, deaths: int, seeds: int) -> dict[str, Any]:
    scores = [_trained(LEARNT[task], way, deaths, seed) for seed in range(seeds)]
    spread = {"score": statistics.mean(scores), "least": min(scores), "most": max(scores)}
    return {**dict(zip(LABELS, (task, way, deaths), strict=True)), **spread}


def _gradients(model: nn.Module, rate: float, world: Elastic) -> Any:
    inner = torch.optim.SGD(model.parameters(), lr=rate)
    return DistributedOptimizer(inner, model.named_parameters(), comm=world, density=0.01, momentum=0.9)


def _updates(model: nn.Module, rate: float, world: Elastic) -> Any:
    inner = torch.optim.Adam(model.parameters(), lr=rate, betas=(0.0, 0.999))
    return UpdateOptimizer(inner, model.named_parameters(), comm=world, density=0.01)


def _local_sgd(model: nn.Module, rate: float, world: Elastic) -> Any:
    inner = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    return LocalSGD(inner, model=model, sync_every=4, comm=world)


def _diloco(model: nn.Module, rate: float, world: Elastic) -> Any:
    return DiLoCo(torch.optim.AdamW(model.parameters(), lr=rate), model=model, sync_every=10, comm=world)


WAYS: dict[str, Callable[[nn.Module, float, Elastic], Any]] = {
    "gradients": _gradients,
    "updates": _updates,
    "local-sgd": _local_sgd,
    "diloco": _diloco,
}


def _trained(task: Task, way: str, deaths: int, seed: int) -> float:
    """Score after the last epoch."""
    chance = random.Random(seed)
    steps = task.epochs * len(task.samples()) // task.batch
    begins, dies = [0.0] * RANKS, list[Dies]()
    living = list(range(RANKS))
    for place in range(RANKS, RANKS + deaths):
        at = steps * STEP_SECONDS * (place - RANKS + chance.random()) / max(deaths, 1)
        dies.append(Dies(living.pop(chance.randrange(len(living))), at=at + 0.1))
        begins.append(at + 0.1 + 10 * STEP_SECONDS * chance.random())
        living.append(place)
    world = SimulatedWorld(RANKS + deaths, seed=seed, faults=dies)
    found = world.run(partial(_on_rank, task=task, way=way, begins=begins, seed=seed))
    return next(score for score in found if score is not None)


def _on_rank(comm: Communicator, task: Task, way: str, begins: Sequence[float], seed: int) -> float:
    comm.elapse(begins[comm.rank])
    torch.manual_seed(seed)
    model = task.model()
    world = Elastic(comm, start_with=RANKS, timeout=10.0)
    optimizer = WAYS[way](model, task.rates[way], world)
    for inputs, targets in world.deal(task.samples(), batch_size=task.batch, epochs=task.epochs, seed=seed):
        comm.elapse(STEP_SECONDS)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if hasattr(optimizer, "average"):
            optimizer.average()
    if hasattr(optimizer, "finish"):
        optimizer.finish()
    return task.score(model)
