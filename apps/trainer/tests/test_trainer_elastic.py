"""Ranks that come and go: they die, come late, or all die and begin again, in simulated worlds."""

import fcntl
import itertools
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import points
import pytest
import streams
import torch
from communicators import Dies, Elastic, SimulatedWorld, metrics
from thinwire_trainer.app import App
from thinwire_trainer.command import main
from thinwire_trainer.command_line.flags import parse
from thinwire_trainer.command_line.options import Options
from thinwire_trainer.errors import RunError
from thinwire_trainer.launching.placement import Placement
from thinwire_trainer.records.metrics import read_metrics
from thinwire_trainer.records.run_folder import RunFolder
from thinwire_trainer.run import run
from torch import Generator, Tensor, nn

pytestmark = pytest.mark.quick

RANKS, EPOCHS, BATCH = 3, 3, 12
STEP = 0.01  # seconds; an exchange takes much less
STEPS = 4  # in an epoch; an evaluation takes as long
EPOCH = 2 * STEPS * STEP
WAYS = {
    "dense": {},
    "gtopk": {"density": 0.3},
    "spardl": {"optimizer": "adamw"},
    "local-sgd": {"sync_every": 3},
    "cocod": {"sync_every": 3},
}
HERE = threading.local()
"""The clock of the rank whose thread it is."""


class Slow(points.Points):
    """Steps and evaluations that take time, of a model whose normalisation takes a batch of one sample."""

    def __init__(self, elapse: Callable[[float], None]) -> None:
        norm = [nn.Unflatten(1, (1, 6)), nn.BatchNorm1d(1), nn.Flatten()]
        model = nn.Sequential(nn.Linear(points.FEATURES, 6), *norm, nn.ReLU(), nn.Linear(6, points.CLASSES))
        super().__init__(model, train_size=STEPS * BATCH)
        self.elapse = elapse

    def loss(self, indices: Tensor, generator: Generator) -> Tensor:
        self.elapse(STEP)
        return super().loss(indices, generator)

    def score(self, indices: Tensor) -> Tensor:
        self.elapse(STEPS * STEP)
        return super().score(indices)

    def kept(self) -> dict[str, Any]:
        return {"classes": points.CLASSES}


def trained(
    options: Options,
    ranks: int = RANKS,
    faults: Sequence[Dies] = (),
    late: float | None = None,
    latecomers: Options | None = None,
) -> list[Any]:
    """Each rank's model, None of one that died; late: when the last rank comes, with these options."""
    start_with = ranks - (late is not None)

    def rank(comm: Any) -> nn.Module | str:
        tasks, HERE.elapse = [], comm.elapse
        comm.elapse(1e-6 * comm.rank)  # they come in their order

        def build(options: Options, device: torch.device) -> Slow:
            tasks.append(Slow(comm.elapse))
            return tasks[0]

        asked = options
        if late is not None and comm.rank == ranks - 1:
            comm.elapse(late)
            asked = latecomers or options
        world = Elastic(comm, start_with=start_with)
        try:
            run(replace(points.APP, build=build), asked, world)
            return tasks[0].model
        except RunError as error:
            return str(error)
        finally:
            world.close()

    return SimulatedWorld(ranks, faults=faults, own_generators=True).run(rank)


def check(options: Options, models: Sequence[Any], *, dead: int) -> None:
    """The run has all its epochs once, one model, and one checkpoint of those who are left."""
    folder = RunFolder(options.output)
    rows = read_metrics(folder.metrics.path)
    assert [row["epoch"] for row in rows] == list(range(1, EPOCHS + 1))
    assert sum(model is None for model in models) == dead
    written = torch.load(folder.model, weights_only=True)
    for model in filter(None, models):
        for name, p in model.named_parameters():
            assert torch.equal(p, written[name])
    last = folder.checkpoints.complete()[-1]
    assert len(list(last.glob("rank*.pt"))) == rows[-1]["world_size"] == len(models) - dead


@pytest.fixture
def elastic(options: Callable[..., Options]) -> Callable[..., Options]:
    return lambda **flags: options(elastic="here:1", batch_size=BATCH, max_epochs=EPOCHS, **flags)


@pytest.mark.slow
@pytest.mark.few(4)
@pytest.mark.parametrize("algorithm", WAYS)
@pytest.mark.parametrize("victim", range(RANKS))
def test_a_rank_dies_in_an_evaluation_and_whoever_is_rank_0_then_goes_on_in_the_folder(
    elastic: Callable[..., Options], algorithm: str, victim: int
) -> None:
    options = elastic(algorithm=algorithm, **WAYS[algorithm])
    check(options, trained(options, faults=[Dies(victim, at=0.75 * EPOCH)]), dead=1)
    first, *_ = read_metrics(RunFolder(options.output).metrics.path)
    assert (first["steps"], first["world_size"]) == (STEPS, RANKS - 1)


def test_a_trace_survives_a_death_after_it_was_written(elastic: Callable[..., Options]) -> None:
    """The epoch's end is done again, and torch exports a profile only once."""
    options = elastic(profile=True)
    check(options, trained(options, faults=[Dies(1, at=1.75 * EPOCH)]), dead=1)
    assert RunFolder(options.output).trace.exists()


@pytest.mark.slow
@pytest.mark.few(3)
@pytest.mark.parametrize("algorithm", WAYS)
@pytest.mark.parametrize("late", [0.15, 1.2])
def test_one_dies_and_a_newcomer_ends_with_the_others(
    elastic: Callable[..., Options], algorithm: str, late: float
) -> None:
    """Its rate, buffers and epoch are the others'."""
    options = elastic(algorithm=algorithm, **WAYS[algorithm])
    models = trained(options, RANKS + 1, [Dies(0, at=2.3 * EPOCH)], late=late * EPOCH)
    check(options, models, dead=1)


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("algorithm", WAYS)
@pytest.mark.parametrize("ranks", [2, RANKS])
def test_after_all_have_died_the_same_command_goes_on_with_any_number_of_ranks(
    elastic: Callable[..., Options], algorithm: str, ranks: int
) -> None:
    options = elastic(algorithm=algorithm, resume="latest", **WAYS[algorithm])
    assert trained(options, faults=[Dies(rank, at=2.2 * EPOCH) for rank in range(RANKS)]) == [None] * RANKS
    assert 1 <= len(read_metrics(RunFolder(options.output).metrics.path)) < EPOCHS
    check(options, trained(options, ranks), dead=0)


def dies_in_operation(number: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """Have rank 0 die, one second into the run, at this operation in its folder; whether it came before any step."""
    begun, done = [], []

    def dying(real: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*args: Any, **kwargs: Any) -> Any:
            path = Path(f"/proc/self/fd/{args[0]}").readlink() if isinstance(args[0], int) else Path(args[0])
            if not begun and path.is_relative_to(folder):
                done.append(real)
                if len(done) == number + 1:
                    if isinstance(args[0], int):
                        fcntl.flock(args[0], fcntl.LOCK_UN)  # as the end of a process does
                    HERE.elapse(2.0)
                    pytest.fail("not rank 0's operation")
            return real(*args, **kwargs)

        return operation

    for name in ("mkdir", "ftruncate", "fsync", "replace", "unlink"):  # only rank 0 makes them
        monkeypatch.setattr(os, name, dying(getattr(os, name)))
    real_loss = Slow.loss
    monkeypatch.setattr(Slow, "loss", lambda *args: begun.append(0) or real_loss(*args))
    return lambda: len(done) > number


@pytest.mark.few(1)
@pytest.mark.parametrize("overwrite", [False, True])
def test_whoever_is_rank_0_after_a_death_in_the_beginning_begins_the_run_again(
    elastic: Callable[..., Options], tmp_path: Path, overwrite: bool
) -> None:
    for number in itertools.count():
        output = tmp_path / ("run" if overwrite else f"{number}")  # of the operation before, to be overwritten
        given = replace(elastic(output=output), overwrite=overwrite, max_epochs=1)
        with pytest.MonkeyPatch.context() as monkeypatch:
            came = dies_in_operation(number, output, monkeypatch)
            ended = trained(given, faults=[Dies(0, at=1.0)])
            if not came():
                break
        assert [type(model) for model in ended] == [type(None), nn.Sequential, nn.Sequential], (number, ended)
        assert {path.name for path in output.glob("*.json*")} == {"config.json", "task.json", "metrics.jsonl"}, number
        again = trained(replace(given, overwrite=False, resume="latest"), 2)
        assert [type(model) for model in again] == [nn.Sequential] * 2, (number, again)
    assert number > 8


def test_a_newcomer_that_does_not_see_the_others_run_is_told_and_the_others_go_on(
    elastic: Callable[..., Options], tmp_path: Path
) -> None:
    options, apart = elastic(), tmp_path / "apart"
    *models, told = trained(options, RANKS + 1, late=STEP, latecomers=elastic(output=apart))
    assert told == f"{apart} holds no run, though others train in it: --output has to be on a shared file system"
    check(options, models, dead=0)


def test_a_newcomer_with_other_flags_is_told_and_the_others_go_on(elastic: Callable[..., Options]) -> None:
    options = elastic()
    *models, told = trained(options, RANKS + 1, late=STEP, latecomers=elastic(lr=0.01))
    assert told == (
        "those who train were started with --lr 0.05, this rank with --lr 0.01: start all ranks with the same flags"
    )
    check(options, models, dead=0)


def test_a_fixed_run_is_not_gone_on_with_elastically(
    options: Callable[..., Options], elastic: Callable[..., Options]
) -> None:
    """A batch is of all ranks there, and of one here."""
    SimulatedWorld(1).run(lambda comm: run(points.APP, options(batch_size=BATCH, max_epochs=EPOCHS), comm))
    (told,) = trained(elastic(resume="latest"), 1)
    assert "--elastic False then, True now" in told


def test_batches_of_a_tasks_own_are_for_a_fixed_number_of_ranks(tmp_path: Path) -> None:
    options = parse(["--elastic", "here:1", "--output", str(tmp_path / "run")], streams.APP, world_size=None)
    with pytest.raises(RunError, match="gru on symbols has batches of its own, for a fixed number of ranks"):
        SimulatedWorld(1).run(lambda comm: run(streams.APP, options, Elastic(comm)))


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ("--elastic nowhere", "given 'nowhere', expected HOST:PORT of python -m communicators.elastic"),
        ("--at-least 2", "--at-least 2 is for ranks that come and go: give it with --elastic"),
        ("--elastic here:1 --nworkers 3", "--nworkers 3 starts a fixed number of ranks: leave it out"),
        ("--elastic here:1 --algorithm auto", "--elastic is not for auto, which measures a fixed number of ranks"),
        ("--elastic here:1 --algorithm eager-solo", "--elastic is not for eager-solo, which counts on a fixed number"),
        ("--elastic here:1 --checkpoint-every 5", "write a checkpoint at the end of each epoch: leave it out"),
        ("--elastic here:1 --inject-delay fixed:0=1", "--inject-delay names ranks, and those of --elastic change"),
        ("--elastic here:1 --backend nccl", "elastic ones talk by gloo: leave it out"),
        ("--elastic", "--elastic without an address is for torchrun: run `python -m communicators.elastic`"),
    ],
)
def test_what_cannot_be_elastic_is_refused_in_a_line(
    app: App, capsys: pytest.CaptureFixture[str], argv: str, told: str
) -> None:
    assert main(app, argv.split()) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


def test_mpi_is_refused(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    from thinwire_trainer import command

    monkeypatch.setattr(command, "first_complaint", lambda complaint, place: complaint)
    with pytest.raises(RunError, match="MPI ends all ranks when one dies, and starts none later"):
        command._checked(app, ["--elastic", "here:1"], Placement(launcher="mpiexec", size=2))


def test_metrics_follow_the_group_through_a_death(
    elastic: Callable[..., Options], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[int, list[Any]] = {}
    monkeypatch.setattr(metrics, "SHARE", float("inf"))
    monkeypatch.setattr(metrics, "Snapshots", partial(metrics.Snapshots, every=0.0))
    monkeypatch.setattr(metrics, "write", lambda shots, path: seen.setdefault(id(shots), []).append(shots.latest))
    trained(elastic(algorithm="gtopk", density=0.3, metrics="file"), faults=[Dies(1, at=1.6 * EPOCH)])
    assert len(seen) == RANKS
    histories = list(seen.values())
    for history in histories:
        assert [stats["steps"] for stats in history] == sorted(stats["steps"] for stats in history)
        assert {(stats["generation"], stats["ranks"]) for stats in history} <= {(1, RANKS), (2, RANKS - 1)}
    assert sorted(history[-1]["generation"] for history in histories) == [1, 2, 2]
    assert max(history[-1]["steps"] for history in histories) >= EPOCHS * STEPS  # more of fewer samples after the death
