"""What a rank's model draws is the rank's own, also where ranks share torch's generators, as in a simulated world."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from communicators import SimulatedWorld
from points import Points
from resumed_runs import assert_same_bits, result
from thinwire_trainer.app import App
from thinwire_trainer.command_line.options import Options
from thinwire_trainer.run import run
from thinwire_trainer.training.batches import DROPOUT, derived_seed
from thinwire_trainer.training.replica import ModelGenerator
from torch import Generator, Tensor

pytestmark = pytest.mark.quick


class Drawing(Points):
    """Draws in forward, backward and evaluation, and keeps what."""

    def loss(self, indices: Tensor, generator: Generator) -> Tensor:
        loss = super().loss(indices, generator)
        self.drawn = [*getattr(self, "drawn", []), float(torch.rand(()))]
        loss.register_hook(lambda gradient: self.drawn.append(float(torch.rand(()))))
        return loss

    def score(self, indices: Tensor) -> Tensor:
        self.drawn.append(float(torch.rand(())))
        return super().score(indices)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_rank_draws_what_it_would_alone(
    app: App, options: Callable[..., Options], ranks: int, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two of a step, and one of an evaluation, from the seed of dropout and the rank's number."""
    monkeypatch.setattr("data_parallel.optimizer.BUCKET_BYTES", 1)
    tasks: list[Drawing] = []

    def build(given: Options, device: torch.device) -> Drawing:
        plain = app.build(given, device)
        tasks.append(Drawing(plain.model))
        return tasks[-1]

    given = options(verify=1, checkpoint_every=2, **({"overlap": True} if overlap else {}))
    SimulatedWorld(ranks).run(lambda comm: run(replace(app, build=build), given, comm))
    expected = []
    for rank in range(ranks):
        alone = torch.Generator().manual_seed(derived_seed(given.seed, DROPOUT, rank))
        expected.append([float(torch.rand((), generator=alone)) for _ in tasks[0].drawn])
    assert len(expected[0]) == 2 * (2 * {1: 6, 2: 3, 3: 2}[ranks] + 1)
    assert sorted(task.drawn for task in tasks) == sorted(expected)


def trained(options: Options) -> tuple[Any, ...]:
    """Losses, the model, and each rank's random numbers; not the bytes, since comparisons of ranks cost some."""
    rows, model, states = result(options)
    return [row["train_loss"] for row in rows], model, [state["torch_rng"] for state in states]


@pytest.mark.parametrize("algorithm", ["dense", "gtopk", "local-sgd"])
def test_flags_that_shape_no_number_change_no_bit(app: App, options: Callable[..., Options], algorithm: str) -> None:
    """Nor does a world in which each rank has torch's generator to itself, as real ranks have."""
    others: dict[str, dict[str, Any]] = {"verify": {"verify": 1}, "checkpoints": {"checkpoint_every": 3}}
    others |= {"profile": {"profile": True}, "alone": {}}
    if algorithm == "dense":
        others["delay"] = {"inject_delay": "linear=0.01"}
    straight = options(algorithm=algorithm, dnn="dropout", output=options().output / "straight")
    SimulatedWorld(2).run(lambda comm: run(app, straight, comm))
    for name, flags in others.items():
        other = options(algorithm=algorithm, dnn="dropout", output=options().output / name, **flags)
        SimulatedWorld(2, own_generators=name == "alone").run(lambda comm, other=other: run(app, other, comm))
        assert_same_bits(trained(other), trained(straight), name)


def test_a_rank_with_a_process_to_itself_goes_on_with_what_was_drawn_outside() -> None:
    expected = torch.Generator().manual_seed(3)
    generator, drawn = ModelGenerator(3), []
    for _ in range(2):
        with generator:
            drawn.append(torch.rand(()))
        drawn.append(torch.rand(()))
    state = generator.state_dict()
    drawn.append(torch.rand(()))
    assert drawn == [torch.rand((), generator=expected) for _ in drawn]
    ModelGenerator(4)
    generator.load_state_dict(state)
    assert torch.rand(()) == drawn[-1]
