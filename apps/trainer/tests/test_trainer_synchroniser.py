"""What the loop offers to any way of synchronising, shown with one that averages periodically in the background."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from communicators import Communicator, SimulatedWorld, Work, allreduce, allreduce_async
from resumed_runs import assert_same_bits, killed_after, result, train
from sparse_collectives import ARCTopK
from thinwire_trainer.app import App
from thinwire_trainer.command_line import quantities
from thinwire_trainer.command_line.flag import Flag
from thinwire_trainer.command_line.flags import parse
from thinwire_trainer.command_line.options import Options
from thinwire_trainer.errors import AgreedError
from thinwire_trainer.records.metrics import read_metrics
from thinwire_trainer.run import run
from thinwire_trainer.synchronisers.synchroniser import Rates, State, Synchroniser, averaged_buffers
from thinwire_trainer.synchronisers.synchronous import sparse
from thinwire_trainer.synchronisers.table import SPARSE, Synchronisation
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters


class Periodic(Synchroniser):
    """Local SGD with a delayed mean, on a communicator of its own. At every τ-th step x, and with s as it was launched:

        x ← mean(s) + (x − s);  s ← x;  the mean of s travels during the next τ steps

    Each rank pretends to have as many more blocks at the end as its number says: the others take part until it is done.
    """

    made: list["Periodic"] = []  # noqa: RUF012 - for the tests to look at

    def __init__(self, options: Options, model: nn.Module, comm: Communicator, rates: Rates) -> None:
        super().__init__(model)
        self.comm, self.every = comm.duplicate(), options.own["sync_every"]
        self.inner = torch.optim.SGD(model.parameters(), lr=options.lr)
        self.schedule = rates(self.inner)
        self.steps = self.rounds = 0
        self.work: Work[Tensor] | None = None
        self.pending = False
        self.launched, self.mean = torch.zeros_like(self.x), torch.zeros_like(self.x)
        self.done = self.closed = False
        self.made.append(self)

    @property
    def x(self) -> Tensor:
        return parameters_to_vector(self.model.parameters()).detach()

    def zero_grad(self) -> None:
        self.inner.zero_grad()

    def update(self) -> None:
        self.inner.step()
        self.schedule.step()
        self.steps += 1

    def average(self) -> None:
        if self.steps % self.every == 0:
            self.apply()
            self.launch(finished=False)

    def launch(self, *, finished: bool) -> None:
        self.launched = self.x.clone()
        self.work = allreduce_async(torch.cat([self.launched, torch.tensor([float(finished)])]), self.comm)
        self.rounds += 1

    def settle(self) -> None:
        if self.work is not None:
            total = self.work.wait()
            self.mean, self.done = total[:-1] / self.comm.size, total[-1] == self.comm.size
            self.work, self.pending = None, True

    def apply(self) -> None:
        self.settle()
        if self.pending:
            vector_to_parameters(self.mean + (self.x - self.launched), self.model.parameters())
            self.pending = False

    def finish(self) -> None:
        more = self.comm.rank
        while not self.done:
            self.apply()
            self.launch(finished=more <= 0)
            self.settle()
            more -= 1
        vector_to_parameters(self.mean, self.model.parameters())
        self.pending = self.done = False

    def close(self) -> None:
        self.closed = True

    @contextmanager
    def averaged_model(self, comm: Communicator) -> Iterator[None]:
        own = self.x.clone()
        vector_to_parameters(allreduce(own, comm, average=True), self.model.parameters())
        try:
            with averaged_buffers(self.model, comm):
                yield
        finally:
            vector_to_parameters(own, self.model.parameters())

    def counters(self) -> dict[str, int | float]:
        return {"rounds": self.rounds}

    def remark(self, steps: int) -> str:
        return f"{self.rounds} rounds in {steps} steps"

    def state_dict(self) -> State:
        self.settle()
        own = {name: getattr(self, name) for name in ("steps", "rounds", "pending", "launched", "mean")}
        return {"periodic": own, "rate": self.schedule.state_dict()}

    def load_state_dict(self, state: State) -> None:
        for name, value in state["periodic"].items():
            setattr(self, name, value)
        self.schedule.load_state_dict(state["rate"])
        self.inner.param_groups[0]["lr"] = self.schedule.get_last_lr()[0]


TAU = Flag(name="sync_every", default=2, read=quantities.count, says="steps between averages")
EXTRA_ROUNDS = {1: 1, 2: 2, 4: 4}  # at the end: as many as the last rank has more, and one in which all are done


@pytest.fixture(scope="session")
def points_app(points_app: App) -> App:
    return replace(points_app, synchronisations={"periodic": Synchronisation(make=Periodic, flags=(TAU,))})


@pytest.fixture
def periodic(options: Callable[..., Options]) -> Callable[..., Options]:
    Periodic.made.clear()
    return lambda **flags: options(algorithm="periodic", **flags)


def exchanged(model: nn.Module, size: int) -> int:
    """Bytes of one mean, of the busiest rank."""
    numel = sum(p.numel() for p in model.parameters()) + 1
    world = SimulatedWorld(size)
    world.run(lambda comm: allreduce_async(torch.zeros(numel), comm).wait())
    return max(world.bytes_sent)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_bytes_of_an_epoch_are_those_of_its_exchanges_in_the_background_and_of_nothing_else(
    app: App, periodic: Callable[..., Options], size: int
) -> None:
    given = periodic(max_epochs=3, checkpoint_every=1)
    train(app, given, size)
    rows = read_metrics(given.output / "metrics.jsonl")
    rounds = [int(row["rounds"]) for row in rows]
    steps = int(rows[0]["steps"])
    assert rounds == [steps // 2, steps, steps * 3 // 2 + EXTRA_ROUNDS[size]]
    cost = exchanged(Periodic.made[0].model, size)
    assert [row["bytes_sent"] for row in rows] == [
        cost * n for n in (rounds[0], rounds[1] - rounds[0], rounds[2] - rounds[1])
    ]
    assert all(made.closed for made in Periodic.made)


@pytest.mark.parametrize("size", [1, 3])
def test_the_exported_and_the_evaluated_model_are_the_mean(
    app: App, periodic: Callable[..., Options], size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    given = periodic(max_epochs=1, sync_every=50)
    train(app, given, size)
    exported = torch.load(given.output / "model.pt", weights_only=True)
    flat = torch.cat([exported[name].flatten() for name, _ in Periodic.made[0].model.named_parameters()])
    for made in Periodic.made:
        torch.testing.assert_close(made.x, flat, rtol=1e-6, atol=1e-7)
    assert f"{size} rounds in" in capsys.readouterr().out


def test_in_mid_run_evaluation_sees_the_mean_and_leaves_every_rank_its_own(
    app: App, periodic: Callable[..., Options]
) -> None:
    scored: list[Tensor] = []

    def build(options: Options, device: torch.device) -> Any:
        task = app.build(options, device)
        score = task.score
        task.score = lambda indices: (scored.append(parameters_to_vector(task.model.parameters())), score(indices))[1]
        return task

    given = periodic(max_epochs=2, sync_every=50)
    train(replace(app, build=build), given, 2)
    first, other = scored[:2]
    assert first.numpy().tobytes() == other.numpy().tobytes()
    checkpoint = given.output / "checkpoints" / "00000003"
    own = [torch.load(checkpoint / f"rank{rank}.pt", weights_only=True)["model"]["0.weight"] for rank in range(2)]
    assert not torch.equal(*own)
    torch.testing.assert_close((own[0] + own[1]).flatten() / 2, first[: own[0].numel()])


@pytest.mark.few(3)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("operations", range(2, 26, 3))
def test_killed_anywhere_and_resumed(
    app: App, periodic: Callable[..., Options], tmp_path: Path, size: int, operations: int
) -> None:
    straight = periodic(output=tmp_path / "straight")
    train(app, straight, size)
    broken = replace(straight, output=tmp_path / "broken", checkpoint_every=1)
    if killed_after(operations, app, broken, size):
        train(app, replace(broken, resume="latest"), size)
    assert_same_bits(result(broken), result(straight))


def test_a_finished_run_is_finished_once(app: App, periodic: Callable[..., Options]) -> None:
    given = periodic()
    train(app, given, 3)
    expected = result(given)
    train(app, replace(given, resume="latest"), 3)
    assert_same_bits(result(given), expected)


def test_another_synchronisation_or_setting_is_not_gone_on_with(
    app: App, options: Callable[..., Options], periodic: Callable[..., Options]
) -> None:
    train(app, periodic(), 2)
    with pytest.raises(AgreedError, match="--sync-every 2 then, 3 now"):
        train(app, periodic(sync_every=3, resume=True), 2)
    with pytest.raises(AgreedError, match="--algorithm periodic then, gtopk now"):
        train(app, options(algorithm="gtopk", resume=True), 2)


def broken(indices: Tensor, generator: torch.Generator) -> Tensor:
    raise ZeroDivisionError("ours")


def test_it_is_closed_also_after_an_error(app: App, periodic: Callable[..., Options]) -> None:
    def build(options: Options, device: torch.device) -> Any:
        task = app.build(options, device)
        task.loss = broken
        return task

    with pytest.raises(ZeroDivisionError, match="ours"):
        SimulatedWorld(1).run(lambda comm: run(replace(app, build=build), periodic(), comm))
    assert [made.closed for made in Periodic.made] == [True]


def test_a_sparse_allreduce_without_a_name_resumes_with_the_same_bits(app: App, tmp_path: Path) -> None:
    app = replace(app, synchronisations={"arc": replace(SPARSE, make=partial(sparse, algorithm=ARCTopK(width=4)))})
    flags = [
        "--algorithm=arc",
        "--momentum=0",
        "--density=0.2",
        "--batch-size=4",
        "--max-epochs=2",
        "--checkpoint-every=1",
    ]
    folders = ((tmp_path / name) for name in ("straight", "broken"))
    straight, broken = (parse([*flags, f"--output={folder}"], app, world_size=None) for folder in folders)
    train(app, straight, 3)
    assert killed_after(9, app, broken, 3)
    train(app, replace(broken, resume="latest"), 3)
    assert_same_bits(result(broken), result(straight))
    assert json.loads((straight.output / "config.json").read_text())["algorithm"] == "arc"
