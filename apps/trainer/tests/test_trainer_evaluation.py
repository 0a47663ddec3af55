"""Evaluation over all ranks, with averaged buffers, leaves the run as it was."""

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from communicators import Communicator, SimulatedWorld
from thinwire_trainer.app import App
from thinwire_trainer.command_line.options import Options
from thinwire_trainer.synchronisers.synchroniser import averaged_buffers
from thinwire_trainer.training.loop import evaluate
from torch import nn

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("size", [1, 2, 5, 16])  # 16 ranks have 11 test samples: some have none
def test_every_world_size_gives_the_same_metrics(app: App, options: Callable[..., Options], size: int) -> None:
    def body(comm: Communicator) -> dict[str, float]:
        torch.manual_seed(0)
        task = app.build(options(), torch.device("cpu"))
        return evaluate(task, comm, averaged_buffers(task.model, comm), nullcontext())

    alone = SimulatedWorld(1).run(body)[0]
    results = SimulatedWorld(size).run(body)
    assert results == [results[0]] * size
    assert results[0] == pytest.approx(alone)


def test_buffers_are_averaged_inside_the_block_only() -> None:
    def body(comm: Communicator) -> tuple[list[float], list[float], int]:
        norm = nn.BatchNorm1d(2)
        norm.running_mean.fill_(float(comm.rank))  # type: ignore[union-attr]
        norm.num_batches_tracked.fill_(7)  # type: ignore[union-attr]
        with averaged_buffers(norm, comm):
            inside = norm.running_mean.tolist()  # type: ignore[union-attr]
        return inside, norm.running_mean.tolist(), int(norm.num_batches_tracked)  # type: ignore[union-attr, arg-type]

    assert SimulatedWorld(3).run(body) == [([1.0, 1.0], [float(rank)] * 2, 7) for rank in range(3)]


def test_a_model_without_buffers_exchanges_nothing() -> None:
    def body(comm: Communicator) -> None:
        with averaged_buffers(nn.Linear(2, 2), comm):
            pass

    world = SimulatedWorld(2)
    world.run(body)
    assert world.bytes_sent == [0, 0]
