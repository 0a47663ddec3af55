"""A task that says itself which batches there are, and carries something from one to the next."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import streams
import torch
from communicators import Communicator, SimulatedWorld
from resumed_runs import assert_same_bits, killed_after, result, train
from thinwire_trainer.app import Batches, Carries, Keeps
from thinwire_trainer.command_line.flags import parse
from thinwire_trainer.command_line.options import Options
from thinwire_trainer.data import fingerprint
from thinwire_trainer.errors import AgreedError, RunError
from thinwire_trainer.records.metrics import read_metrics
from thinwire_trainer.records.run_folder import RunFolder
from thinwire_trainer.run import run


@pytest.fixture
def asked(tmp_path: Path) -> Callable[..., Options]:
    def make(*words: str, output: str = "run", ranks: int | None = None) -> Options:
        argv = f"--batch-size 3 --max-epochs 2 --lr 0.5 --momentum 0.5 --output {tmp_path / output}".split()
        return parse([*argv, *words], streams.APP, world_size=ranks)

    return make


def test_the_example_has_all_of_it(asked: Callable[..., Options]) -> None:
    task = streams.build(asked(), torch.device("cpu"))
    for protocol in Batches, Carries, Keeps:
        assert isinstance(task, protocol)


@pytest.mark.parametrize("ranks", [1, 2, 7])  # 7 ranks have 5 test streams: two have none
def test_steps_are_the_batches_and_every_test_stream_is_scored_once_and_in_order(
    asked: Callable[..., Options], ranks: int
) -> None:
    options, tasks = asked(), []

    def build(options: Options, device: torch.device) -> streams.Streams:
        tasks.append(streams.build(options, device))
        return tasks[-1]

    train(replace(streams.APP, build=build), options, ranks)
    rows = read_metrics(options.output / "metrics.jsonl")
    assert [row["steps"] for row in rows] == [12, 24]
    assert [row["tested"] for row in rows] == [streams.TESTS * (streams.LENGTH - 1)] * 2
    for task in tasks:
        assert [piece.start for piece in task.tested] == [*range(0, 96, 24)] * 2


def test_a_test_stream_is_scored_alike_by_whatever_number_of_ranks(asked: Callable[..., Options]) -> None:
    losses = []
    for ranks in (1, 2, 5):
        options = asked("--lr", "1e-30", "--max-epochs", "1", output=f"run{ranks}")
        train(streams.APP, options, ranks)
        losses.append(read_metrics(options.output / "metrics.jsonl")[0]["test_loss"])
    assert losses == [pytest.approx(losses[0], rel=1e-6)] * 3


@pytest.mark.few(2)
@pytest.mark.parametrize("algorithm", ["dense", "gtopk", "overlap-local-sgd", "diloco"])
def test_killed_in_the_middle_of_an_epoch_and_resumed(
    asked: Callable[..., Options], tmp_path: Path, algorithm: str
) -> None:
    """The hidden state goes on: without it the rest of the epoch would begin with zeros."""
    straight = asked("--algorithm", algorithm, output="straight")
    train(streams.APP, straight, 2)
    broken = replace(straight, output=tmp_path / "broken", checkpoint_every=5)
    assert killed_after(25, streams.APP, broken, 2)
    newest = max(path.parent.name for path in broken.output.glob("checkpoints/*/manifest.json"))
    assert int(newest) % 12 != 0, "in the middle of an epoch"
    state = torch.load(broken.output / "checkpoints" / newest / "rank1.pt", weights_only=True)
    assert state["task"]["hidden"].abs().sum() > 0
    train(streams.APP, replace(broken, resume="latest"), 2)
    assert_same_bits(result(broken), result(straight))


def test_with_another_number_of_ranks_what_is_carried_begins_anew(asked: Callable[..., Options]) -> None:
    options = asked("--lr-schedule", "constant")
    train(streams.APP, options, 3)
    for name in ("rank0.pt", "rank1.pt", "rank2.pt"):
        state = torch.load(options.output / "checkpoints" / f"{24:08d}" / name, weights_only=True)
        assert state["task"]["hidden"].abs().sum() > 0
    train(streams.APP, replace(options, max_epochs=3, resume="latest", residuals="carry"), 2)
    rows = read_metrics(options.output / "metrics.jsonl")
    assert [(row["steps"], row["world_size"]) for row in rows] == [(12, 3), (24, 3), (36, 2)]


class Uneven(streams.Streams):
    """A task whose batches are not what they have to be."""

    how: Any = None

    def train_batches(self, *, rank: int, size: int, batch_size: int, seed: int, epoch: int) -> Sequence[streams.Piece]:
        given = super().train_batches(rank=rank, size=size, batch_size=batch_size, seed=seed, epoch=epoch)
        return self.how(given, rank=rank, epoch=epoch)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("how", "says"),
    [
        (lambda given, rank, epoch: given[rank:], "rank 0 has 12 batches in an epoch, rank 1 has 11"),
        (
            lambda given, rank, epoch: given[epoch * rank :],
            r"11 batches in epoch 2, expected 12.*\(on rank 1, 2 of 3\)",
        ),
        (lambda given, rank, epoch: [], "no batch to train on"),
    ],
)
def test_ranks_that_have_other_numbers_of_batches_are_an_error_on_all(
    asked: Callable[..., Options], how: Callable[..., Any], says: str
) -> None:
    def build(options: Options, device: torch.device) -> streams.Streams:
        task = Uneven(streams.Net(), options)
        task.how = how
        return task

    def body(comm: Any) -> str:
        with pytest.raises(AgreedError, match=says) as error:
            run(replace(streams.APP, build=build), asked("--max-epochs", "2"), comm)
        return str(error.value)

    first, *others = SimulatedWorld(3).run(body)
    assert others == [first] * 2


def test_a_checkpoint_with_another_state_of_the_task_is_refused(asked: Callable[..., Options]) -> None:
    options = asked("--lr-schedule", "constant")
    train(streams.APP, options, 1)

    class Wider(streams.Streams):
        def state_dict(self) -> dict[str, Any]:
            return {"hidden": torch.zeros(1, 4, streams.HIDDEN)}

    app = replace(streams.APP, build=lambda options, device: Wider(streams.Net(), options))
    with pytest.raises(AgreedError, match=r"rank0\.pt does not fit this run .*hidden is \(1, 3, 5\)"):
        train(app, replace(options, max_epochs=3, resume="latest"), 1)


class Own:
    """An object of the app's own."""


LATER = {  # what state_dict returns at its n-th call -> what is said of it
    "an object of the app's": (lambda n, hidden: {"hidden": hidden, "own": [Own()]}, 0, "own is, or has, a Own"),
    "a function": (lambda n, hidden: {"hidden": hidden, "own": lambda: 0}, 0, "own is, or has, a function"),
    "none": (lambda n, hidden: None, 0, r"state_dict\(\) is a NoneType, expected a dict"),
    "a key that appears": (
        lambda n, hidden: {"hidden": hidden} | ({"late": 1} if n else {}),
        5,
        "late is plain, expected nothing as in a new task's state",
    ),
    "a tensor in place of nothing": (
        lambda n, hidden: {"hidden": hidden if n else None},
        5,
        r"hidden is \(1, 3, 5\) of .*, expected plain",
    ),
    "another shape": (lambda n, hidden: {"hidden": hidden[:, n:]}, 5, r"hidden is \(1, 2, 5\) .* expected \(1, 3, 5\)"),
    "on one rank": (
        lambda n, hidden: {"hidden": hidden if hidden.abs().sum() < 1e9 else Own()},
        5,
        r"hidden is, or has, a Own.* \(on rank 1 of 2\)",
    ),
}


@pytest.mark.parametrize("fault", LATER)
def test_a_state_that_could_never_be_loaded_ends_the_run_at_the_first_checkpoint_on_all_ranks(
    asked: Callable[..., Options], fault: str
) -> None:
    given, steps, says = LATER[fault]
    options, taken = asked("--checkpoint-every", "5"), []

    def body(comm: Any) -> str:
        class Odd(streams.Streams):
            calls = -1

            def state_dict(self) -> dict[str, Any]:
                self.calls += 1
                hidden = self.state + (1e10 if fault == "on one rank" and comm.rank and self.calls else 0)
                return given(min(self.calls, 1), hidden)  # type: ignore[no-any-return]

            def loss(self, *batch: Any) -> Any:
                taken.append(comm.rank)
                return super().loss(*batch)

        with pytest.raises(AgreedError, match=f"the task's state cannot be loaded again: .*{says}") as error:
            run(replace(streams.APP, build=lambda options, device: Odd(streams.Net(), options)), options, comm)
        return str(error.value)

    first, second = SimulatedWorld(2).run(body)
    assert first == second
    assert len(taken) == 2 * steps


def test_a_run_goes_on_only_with_what_its_task_kept(asked: Callable[..., Options]) -> None:
    options = asked("--lr-schedule", "constant")
    train(streams.APP, options, 1)

    class Renamed(streams.Streams):
        def kept(self) -> dict[str, Any]:
            return {"symbols": list("abdc")}

    app = replace(streams.APP, build=lambda options, device: Renamed(streams.Net(), options))
    with pytest.raises(AgreedError, match=r"task.json is not what these data give"):
        train(app, replace(options, max_epochs=3, resume="latest"), 1)
    task = options.output / "task.json"
    task.write_text(task.read_text()[:-9])
    with pytest.raises(AgreedError, match=r"task.json is damaged: .* copy it back, or begin another run$"):
        train(streams.APP, replace(options, max_epochs=3, resume="latest"), 1)


@pytest.mark.parametrize("strange", [0, 2])
def test_ranks_whose_tasks_keep_different_things_are_refused_by_name(
    asked: Callable[..., Options], strange: int
) -> None:
    def body(comm: Communicator) -> None:
        class Fed(streams.Streams):
            def kept(self) -> dict[str, Any]:
                return {"symbols": list("abcd"), "train_data": f"data of {comm.rank == strange}"}

        run(replace(streams.APP, build=lambda options, device: Fed(streams.Net(), options)), asked(), comm)

    with pytest.raises(AgreedError, match=rf"rank {strange or 1} has other data than rank 0 \(other train data\)"):
        SimulatedWorld(3).run(body)
    assert not asked().output.joinpath("config.json").exists()


def test_what_an_older_version_of_the_task_did_not_keep_is_not_compared(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.begin({}, kept={"tokens": ["a"]}, overwrite=False)
    folder.require_kept({"tokens": ["a"], "train_data": "3 parts"})
    for other in ({"tokens": ["b"], "train_data": "3 parts"}, {"train_data": "3 parts"}):
        with pytest.raises(RunError, match="other tokens"):
            folder.require_kept(other)
    with pytest.raises(RunError, match="other task"):
        folder.require_kept(None)


def test_a_fingerprint_tells_data_apart_that_are_cut_or_arranged_otherwise() -> None:
    row = torch.arange(4)
    parts: list[list[torch.Tensor | str]] = [
        [row],
        [row.flip(0)],
        [row[:2], row[2:]],
        [row.view(2, 2)],
        [row.int()],
        ["ab", "c"],
        ["a", "bc"],
        [],
    ]
    assert len({fingerprint(each) for each in parts}) == len(parts)
    assert fingerprint([row.repeat(2)[::2]]) == fingerprint([torch.tensor([0, 2, 0, 2])])
