"""Gone on with by another number of ranks: what all shared stays, what was each rank's own is shared out by rule."""

import copy
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from communicators import Communicator
from resumed_runs import assert_same_bits, killed_after, result, train
from thinwire_trainer import run as run_module
from thinwire_trainer.app import App
from thinwire_trainer.command_line.options import Options
from thinwire_trainer.errors import AgreedError
from thinwire_trainer.records.metrics import read_metrics
from thinwire_trainer.records.run_folder import RunFolder
from thinwire_trainer.synchronisers.periodic import MAKERS
from thinwire_trainer.synchronisers.synchroniser import Synchroniser
from thinwire_trainer.synchronisers.table import TABLE
from thinwire_trainer.training.learning_rate import cosine

State = dict[str, Any]
FED_BACK = ["topk-allgather", "topk-dsa", "gtopk", "oktopk", "spardl", "powersgd", "dense-int8"]


def saved(options: Options) -> list[State]:
    """All ranks' states in the newest checkpoint."""
    [*_, last] = RunFolder(options.output).checkpoints.complete()
    return [torch.load(last / f"rank{rank}.pt", weights_only=True) for rank in range(len(list(last.glob("rank*"))))]


@pytest.fixture
def resumed(app: App, monkeypatch: pytest.MonkeyPatch) -> Callable[[Options, int], list[State]]:
    """Goes on, to the end, and returns what each rank held right after the checkpoint was taken."""

    def go_on(options: Options, ranks: int) -> list[State]:
        seen: dict[int, State] = {}
        real = run_module.resume

        def resume(replica: Any, folder: Any, given: Any, comm: Communicator, **named: Any) -> int | None:
            step = real(replica, folder, given, comm, **named)
            seen[comm.rank] = copy.deepcopy(replica.state_dict())
            return step

        with monkeypatch.context() as patched:
            patched.setattr(run_module, "resume", resume)
            train(app, options, ranks)
        return [seen[rank] for rank in range(ranks)]

    return go_on


def fed_back(states: Sequence[State], part: str) -> dict[str, torch.Tensor]:
    """The mean over ranks of what is still to be applied."""
    found = [state["optimizer"]["distributed"].get(part, {}) for state in states]
    own = [kept.get("parts", kept) for kept in found]  # those of a compressed average stand beside their kind
    return {name: torch.stack([kept[name].double() for kept in own]).mean(0) for name in own[0]}


def assert_taken_over(then: Sequence[State], now: Sequence[State], *, drop: bool) -> None:
    ranks, buffers = len(then), {"1.running_mean", "1.running_var"}
    for rank, state in enumerate(now):
        first, own = then[0], then[rank % ranks]
        shared = {name: value for name, value in first["model"].items() if name not in buffers}
        assert_same_bits({name: state["model"][name] for name in shared}, shared)
        for name in buffers:
            mean = torch.stack([other["model"][name].double() for other in then]).mean(0)
            torch.testing.assert_close(state["model"][name].double(), mean)
        assert_same_bits(state["optimizer"]["state"], own["optimizer"]["state"])
        assert state["optimizer"]["param_groups"] == first["optimizer"]["param_groups"]
        if rank < ranks:
            assert_same_bits(state["generator"], own["generator"])
        assert state["position"]["epoch"] == first["position"]["epoch"]
        assert not any(state["totals"].values())
    for part in ("residuals", "velocities"):
        for name, mean in fed_back(now, part).items():
            expected = torch.zeros_like(mean) if drop else fed_back(then, part)[name]
            torch.testing.assert_close(mean, expected, rtol=1e-5, atol=1e-7)


OWN = ("diloco", "sparseloco", "demo")
"""Their residuals are of their own ranks, and can only be dropped."""


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("algorithm", "how"),
    [*((name, "carry") for name in TABLE if name not in OWN[1:]), *((name, "drop") for name in [*FED_BACK, *OWN])],
)
def test_there_and_back_with_another_number_of_ranks(
    app: App, options: Callable[..., Options], resumed: Callable[..., list[State]], algorithm: str, how: str
) -> None:
    """P → M → P. The milestone lies between, so that the rate is not the same throughout."""
    own = {"compress": "int8"} if (algorithm, how) == ("diloco", "drop") else {}
    flags = {"algorithm": algorithm, "momentum": 0.9, "milestones": 2, "dnn": "dropout", **own}
    train(app, options(max_epochs=1, **flags), 2)
    for hop, ranks in enumerate((5, 2, 1, 2)):
        longer = options(max_epochs=2 + hop, resume=True, residuals=how, **flags)
        then = saved(longer)
        assert_taken_over(then, resumed(longer, ranks), drop=how == "drop")
        if algorithm in FED_BACK and len(then) > 1:  # there was something to lose
            assert any(bool(mean.any()) for mean in fed_back(then, "residuals").values())
    rows = read_metrics(longer.output / "metrics.jsonl")
    assert [(row["epoch"], row["steps"], row["world_size"]) for row in rows] == [
        (1, 3, 2), (2, 5, 5), (3, 8, 2), (4, 14, 1), (5, 17, 2),
    ]  # fmt: skip


@pytest.mark.few(1)
@pytest.mark.parametrize("algorithm", ["dense", "gtopk", "spardl", "local-sgd"])
def test_what_goes_on_with_other_ranks_is_killed_anywhere_and_resumed(
    app: App, options: Callable[..., Options], tmp_path: Path, algorithm: str
) -> None:
    flags = {"algorithm": algorithm, "momentum": 0.9, "lr_schedule": "constant"}
    train(app, options(output=tmp_path / "begun", max_epochs=1, **flags), 2)
    shutil.copytree(tmp_path / "begun", tmp_path / "straight")
    given = {"max_epochs": 3, "resume": True, **flags}
    straight = options(output=tmp_path / "straight", residuals="carry", **given)
    train(app, straight, 3)
    for operations in (0, 6, 12, 18):
        broken = options(output=tmp_path / f"broken{operations}", checkpoint_every=1, **given)
        shutil.copytree(tmp_path / "begun", broken.output)
        assert killed_after(operations, app, replace(broken, residuals="carry"), 3)
        train(app, replace(broken, residuals="carry" if len(saved(broken)) == 2 else None), 3)
        assert_same_bits(result(broken), result(straight))


def test_the_rate_goes_by_epochs(
    app: App, options: Callable[..., Options], resumed: Callable[..., list[State]]
) -> None:
    """A run of six epochs that ends after two, with a warm-up that is not over."""
    given = options(algorithm="gtopk", max_epochs=6, lr_schedule="cosine", warmup_epochs=4)
    assert killed_after(22, app, given, 2)
    epoch = saved(given)[0]["position"]["epoch"]
    assert 0 < epoch < 4
    for state in resumed(replace(given, resume="latest", residuals="carry"), 4):
        rate = 0.05 * (epoch * 2 + 1) / 8 * cosine(epoch / 6)  # two steps an epoch
        assert state["optimizer"]["param_groups"][0]["lr"] == pytest.approx(rate)
        assert (state["schedule"]["last_epoch"], state["position"]["since_step"]) == (2 * epoch, 3 * epoch)
    assert saved(given)[0]["optimizer"]["param_groups"][0]["lr"] == pytest.approx(0)


@pytest.mark.parametrize(
    ("flags", "ranks", "residuals", "says"),
    [
        (
            {},
            2,
            None,
            r"3 ranks, now there are 2: start it with --nworkers 3, or .* --residuals carry or drop$",
        ),
        (
            {},
            3,
            "carry",
            r"--residuals carry is for another number of ranks .* which is 3, as now: leave it out$",
        ),
        ({"lr": 0.2}, 2, "drop", "--lr 0.05 then, 0.2 now"),
    ],
)
def test_the_flag_is_needed_where_it_means_something_and_only_there(
    app: App, options: Callable[..., Options], flags: dict[str, Any], ranks: int, residuals: str | None, says: str
) -> None:
    train(app, options(), 3)
    with pytest.raises(AgreedError, match=says):
        train(app, replace(options(resume=True), residuals=residuals, **flags), ranks)


def test_not_from_the_middle_of_an_epoch(app: App, options: Callable[..., Options]) -> None:
    given = options(algorithm="gtopk", checkpoint_every=2)
    assert killed_after(9, app, given, 2)
    assert saved(given)[0]["position"]["step"]
    with pytest.raises(AgreedError, match=r"middle of an epoch, .* dealt out to 2 ranks: .*go on with --nworkers 2"):
        train(app, replace(given, resume="latest", residuals="carry"), 3)


@pytest.mark.few(4)
@pytest.mark.parametrize("algorithm", MAKERS)
def test_models_that_were_not_averaged_are_not_taken(app: App, options: Callable[..., Options], algorithm: str) -> None:
    given = options(algorithm=algorithm, max_epochs=4)
    assert killed_after(14, app, given, 2)
    with pytest.raises(AgreedError, match=r"only from the end of a run, where it drains: end it with --nworkers 2"):
        train(app, replace(given, resume="latest", residuals="carry"), 3)


@pytest.mark.few(2)
@pytest.mark.parametrize("algorithm", ["local-sgd", "diloco", "streaming-diloco"])
def test_what_a_compressed_average_has_not_sent_is_dropped_only(
    app: App, options: Callable[..., Options], algorithm: str
) -> None:
    flags = {"algorithm": algorithm, "compress": "int4", "lr_schedule": "constant"}
    train(app, options(max_epochs=1, **flags), 2)
    longer = options(max_epochs=2, resume=True, residuals="carry", **flags)
    with pytest.raises(AgreedError, match=r"--residuals carry is not for .*--compress .*: give --residuals drop"):
        train(app, longer, 3)
    train(app, replace(longer, residuals="drop"), 3)
    assert [row["world_size"] for row in read_metrics(longer.output / "metrics.jsonl")] == [2, 3]


@pytest.mark.parametrize("damaged", ["another rank's", "cut"])
def test_every_rank_refuses_what_one_file_makes_impossible(
    app: App, options: Callable[..., Options], damaged: str
) -> None:
    """A file that only one of fewer ranks would inherit from."""
    train(app, options(algorithm="gtopk", max_epochs=1, lr_schedule="constant"), 3)
    [last] = RunFolder(options().output).checkpoints.complete()
    path = last / "rank2.pt"
    path.write_bytes((last / "rank1.pt").read_bytes() if damaged == "another rank's" else path.read_bytes()[:-1])
    longer = options(algorithm="gtopk", max_epochs=2, lr_schedule="constant", resume=True, residuals="carry")
    before = longer.output.joinpath("metrics.jsonl").read_bytes()
    with pytest.raises(AgreedError, match=r"rank2\.pt is damaged.*--resume previous$"):
        train(app, longer, 2)
    assert longer.output.joinpath("metrics.jsonl").read_bytes() == before


def test_an_algorithm_that_does_not_say_how_refuses(
    app: App, options: Callable[..., Options], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("thinwire_trainer.synchronisers.synchronous.SynchronousSGD.resized", Synchroniser.resized)
    train(app, options(lr_schedule="constant", max_epochs=1), 2)
    with pytest.raises(AgreedError, match="goes on with as many ranks only: leave --residuals out"):
        train(app, options(lr_schedule="constant", resume=True, residuals="drop"), 3)
