"""Law 7: stopped anywhere and resumed, a run ends in the bits of the one that was never stopped."""

import hashlib
import json
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from communicators import Communicator, SimulatedWorld
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from resumed_runs import SECONDS, assert_same_bits, killed_after, result, train
from thinwire_trainer.app import App
from thinwire_trainer.command_line.flags import table_of
from thinwire_trainer.command_line.options import Options
from thinwire_trainer.errors import AgreedError
from thinwire_trainer.records.metrics import read_metrics
from thinwire_trainer.records.run_folder import RunFolder
from thinwire_trainer.run import run
from thinwire_trainer.synchronisers.periodic import MAKERS
from thinwire_trainer.synchronisers.table import TABLE
from thinwire_trainer.training import replica
from thinwire_trainer.training.replica import Replica


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    algorithm=st.sampled_from(["dense", "gtopk", "topk-allgather"]),
    ranks=st.sampled_from([1, 2, 3]),
    every=st.sampled_from([None, 1, 2, 3]),
    operations=st.integers(0, 25),
)
def test_killed_anywhere_and_resumed(
    app: App,
    options: Callable[..., Options],
    tmp_path: Path,
    algorithm: str,
    ranks: int,
    every: int | None,
    operations: int,
) -> None:
    """Runs that are never stopped are alike in all examples of as many ranks: one of each will do."""
    shutil.rmtree(tmp_path / "broken", ignore_errors=True)
    output = tmp_path / f"{algorithm}-{ranks}"
    straight = options(algorithm=algorithm, output=output, momentum=0.9, lr_schedule="cosine")
    if not output.exists():
        train(app, straight, ranks)
    broken = replace(straight, output=tmp_path / "broken", checkpoint_every=every)
    if killed_after(operations, app, broken, ranks):
        begun = broken.output.joinpath("config.json").exists()
        train(app, replace(broken, resume="latest" if begun else None), ranks)
    assert_same_bits(result(broken), result(straight))


@pytest.mark.few(2)
@pytest.mark.filterwarnings("ignore:two momenta multiply")  # of DiLoCo, whose blocks are short here
@pytest.mark.parametrize("algorithm", MAKERS)
def test_periodic_averaging_is_killed_anywhere_and_resumed(
    app: App, options: Callable[..., Options], tmp_path: Path, algorithm: str
) -> None:
    """In mid-block, and with exchanges in flight, which are stored unapplied."""
    flags: dict[str, Any] = {"max_epochs": 3, "sync_every": 2, "momentum": 0.9}
    if algorithm in ("diloco", "streaming-diloco"):
        flags |= {"compress": "int4"} if algorithm == "diloco" else {"fragments": 2}
    for ranks, operations in ((1, 25), (2, 24), (3, 31)):
        straight = options(algorithm=algorithm, output=tmp_path / f"straight{ranks}", **flags)
        train(app, straight, ranks)
        broken = replace(straight, output=tmp_path / f"broken{ranks}", checkpoint_every=1)
        assert killed_after(operations, app, broken, ranks)
        train(app, replace(broken, resume="latest"), ranks)
        assert_same_bits(result(broken), result(straight))


@pytest.mark.few(2)
@pytest.mark.parametrize("select", ["topk", "dgc", "gaussiank", "randomk", "threshold"])
def test_every_selection_is_killed_anywhere_and_resumed(
    app: App, options: Callable[..., Options], tmp_path: Path, select: str
) -> None:
    own = {"select": select} | ({"threshold": 0.05} if select == "threshold" else {})
    straight = options(algorithm="gtopk", output=tmp_path / "straight", momentum=0.9, **own)
    train(app, straight, 2)
    broken = replace(straight, output=tmp_path / "broken", checkpoint_every=1)
    assert killed_after(20, app, broken, 2)
    other = replace(broken, own={**broken.own, "select": "topk" if select == "dgc" else "dgc"}, resume="latest")
    with pytest.raises(AgreedError, match=f"--select {select} then"):
        train(app, other, 2)
    train(app, replace(broken, resume="latest"), 2)
    assert_same_bits(result(broken), result(straight))


@pytest.mark.few(2)
@pytest.mark.parametrize("algorithm", [name for name, entry in TABLE.items() if entry.overlaps])
def test_an_exchange_that_overlaps_is_killed_anywhere_and_resumed(
    app: App,
    options: Callable[..., Options],
    tmp_path: Path,
    algorithm: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In buckets of one parameter, so that some are under way while others are computed."""
    monkeypatch.setattr("data_parallel.optimizer.BUCKET_BYTES", 1)
    flags = {"algorithm": algorithm, "momentum": 0.9, "overlap": True}
    straight = options(output=tmp_path / "straight", **flags)
    train(app, straight, 2)
    broken = replace(straight, output=tmp_path / "broken", checkpoint_every=1)
    assert killed_after(20, app, broken, 2)
    with pytest.raises(AgreedError, match="--overlap True then, False now"):
        train(app, replace(broken, overlap=False, resume="latest"), 2)
    train(app, replace(broken, resume="latest"), 2)
    assert_same_bits(result(broken), result(straight))


@pytest.mark.few(2)
@pytest.mark.parametrize("algorithm", TABLE)
def test_the_same_seed_and_world_give_the_same_bits(
    app: App, options: Callable[..., Options], tmp_path: Path, algorithm: str
) -> None:
    flags = {"algorithm": algorithm, "momentum": 0.9, "label_smoothing": 0.1, "dnn": "dropout"}
    first, second, other = (options(output=tmp_path / name, **flags) for name in ("first", "second", "other"))
    train(app, first, 3)
    torch.rand(7)  # what else draws numbers in a process has nothing to do with it
    train(app, second, 3)
    assert_same_bits(result(second), result(first))
    train(app, replace(other, seed=1), 3)
    assert result(other)[0] != result(first)[0]


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_model_itself_may_draw_random_numbers(
    app: App, options: Callable[..., Options], tmp_path: Path, ranks: int
) -> None:
    """Killed in the middle of an epoch."""
    straight = options(dnn="dropout", output=tmp_path / "straight")
    train(app, straight, ranks)
    broken = replace(straight, output=tmp_path / "broken", checkpoint_every=1)
    assert killed_after(20, app, broken, ranks)
    torch.manual_seed(99)  # a new process would not begin with the old one's generator either
    train(app, replace(broken, resume="latest"), ranks)
    assert_same_bits(result(broken), result(straight))


@pytest.mark.parametrize(("then", "now"), [(False, True), (True, False)])
def test_whether_there_is_a_gpu_may_change_between_a_run_and_its_continuation(
    app: App,
    options: Callable[..., Options],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    then: bool,
    now: bool,
) -> None:
    """A pretended GPU, which has only random numbers."""
    drawn = torch.arange(16, dtype=torch.uint8)
    put_back: list[torch.Tensor] = []
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: drawn)
    monkeypatch.setattr(torch.cuda, "set_rng_state", put_back.append)
    straight = options(output=tmp_path / "straight")
    train(app, straight, 1)
    monkeypatch.setattr(replica, "uses_gpu", lambda: then)
    broken = replace(straight, output=tmp_path / "broken", checkpoint_every=1)
    assert killed_after(20, app, broken, 1)
    monkeypatch.setattr(replica, "uses_gpu", lambda: now)
    train(app, replace(broken, resume="latest"), 1)
    assert put_back == []
    rows, model, _ = result(broken)
    assert_same_bits([rows, model], list(result(straight)[:2]))


def test_a_damaged_checkpoint_is_named_and_the_previous_one_taken_when_asked(
    app: App, options: Callable[..., Options]
) -> None:
    straight = options(algorithm="gtopk")
    train(app, straight, 3)
    expected = result(straight)
    damaged = RunFolder(straight.output).checkpoints.complete()[-1] / "rank1.pt"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with pytest.raises(AgreedError, match=r"rank1\.pt is damaged.*--resume previous.*on rank 1 of 3"):
        train(app, replace(straight, resume="latest"), 3)
    train(app, replace(straight, resume="previous"), 3)
    assert_same_bits(result(straight), expected)
    train(app, replace(straight, resume="latest"), 3)  # nothing is left to do
    assert_same_bits(result(straight), expected)


@pytest.mark.parametrize(
    ("ranks", "changed", "says"),
    [
        (2, {}, "has 3 ranks, now there are 2: start it with --nworkers 3"),
        (3, {"lr": 0.2}, "--lr 0.05 then, 0.2 now"),
        (3, {"max_epochs": 3}, "--max-epochs 2 then, 3 now"),
    ],
)
def test_another_run_cannot_be_resumed(
    app: App, options: Callable[..., Options], ranks: int, changed: dict[str, Any], says: str
) -> None:
    train(app, options(), 3)
    with pytest.raises(AgreedError, match=says):
        train(app, replace(options(resume="latest"), **changed), ranks)


@pytest.mark.parametrize(
    ("ended", "ranks", "changed", "says"),
    [
        (False, 2, {"lr": 0.2}, "--lr 0.05 then, 0.2 now"),
        (False, 2, {"max_epochs": 3}, "--max-epochs 2 then, 3 now"),
        (False, 1, {}, "has 2 ranks and no checkpoint yet, now there are 1"),
        (False, 1, {"residuals": "carry"}, "has 2 ranks and no checkpoint yet, now there are 1"),
        (True, 2, {}, "has ended and kept no checkpoint: --overwrite begins anew"),
    ],
)
def test_a_run_without_a_checkpoint_starts_again_only_as_it_began(
    app: App, options: Callable[..., Options], ended: bool, ranks: int, changed: dict[str, Any], says: str
) -> None:
    given = options(checkpoint_every=0)
    assert killed_after(10**6 if ended else 4, app, given, 2) is not ended
    before = {path: path.read_bytes() for path in given.output.rglob("*") if path.is_file()}
    with pytest.raises(AgreedError, match=says):
        train(app, replace(given, resume="latest", **changed), ranks)
    assert {path: path.read_bytes() for path in before} == before


def test_a_finished_run_is_neither_overwritten_nor_invented(app: App, options: Callable[..., Options]) -> None:
    with pytest.raises(AgreedError, match="holds no run to resume"):
        train(app, options(resume="latest"), 2)
    train(app, options(), 2)
    bystanders = [options().output / "notes.txt", options().output / "checkpoints" / "notes.txt"]
    for bystander in bystanders:
        bystander.write_text("mine")
    with pytest.raises(AgreedError, match="already holds a run"):
        train(app, options(), 2)
    train(app, options(overwrite=True, max_epochs=1), 2)
    assert len(read_metrics(options().output / "metrics.jsonl")) == 1
    assert [bystander.read_text() for bystander in bystanders] == ["mine", "mine"]


def test_a_longer_run_at_a_constant_rate_goes_on_where_it_ended(
    app: App, options: Callable[..., Options], tmp_path: Path
) -> None:
    long = options(lr_schedule="constant", max_epochs=3, output=tmp_path / "long")
    train(app, long, 2)
    short = replace(long, max_epochs=1, output=tmp_path / "short")
    train(app, short, 2)
    with pytest.raises(AgreedError, match=r"\(--lr-schedule constant then, cosine now\): give the same flags again$"):
        train(app, replace(short, max_epochs=3, lr_schedule="cosine", resume="latest"), 2)
    train(app, replace(short, max_epochs=3, resume="latest"), 2)
    assert_same_bits(result(short), result(long))


def test_metrics_have_the_published_keys(app: App, options: Callable[..., Options]) -> None:
    train(app, options(algorithm="gtopk"), 2)
    rows = read_metrics(options().output / "metrics.jsonl")
    assert [(row["epoch"], row["steps"], row["world_size"]) for row in rows] == [(1, 3, 2), (2, 6, 2)]
    keys = {"epoch", "steps", "train_loss", "test_loss", "test_accuracy", "bytes_sent", "algorithm", "world_size"}
    assert set(rows[0]) == keys | SECONDS
    assert rows[0]["bytes_sent"] == rows[1]["bytes_sent"] > 0


FIRST_SETTINGS = {
    "dnn", "dataset", "algorithm", "density", "batch_size", "lr", "momentum", "weight_decay",
    "max_epochs", "warmup_epochs", "lr_schedule", "seed",
}  # fmt: skip
"""Of the first version: all that came later say what a run did before."""
ADDED = (
    "optimizer", "clip_norm", "nesterov", "label_smoothing", "milestones", "amp", "compile", "overlap", "elastic",
)  # fmt: skip


def older(folder: Path, *names: str) -> None:
    """Manifests of a version without these settings, and without checksums of the metrics."""
    for path in folder.glob("checkpoints/*/manifest.json"):
        content = json.loads(path.read_text())["content"]
        content["settings"] = {name: value for name, value in content["settings"].items() if name not in names}
        content.pop("metrics_sha256", None)
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        path.write_text(json.dumps({"content": content, "sha256": digest}, indent=1, sort_keys=True) + "\n")


def test_every_setting_that_was_added_says_what_runs_did_before(app: App, options: Callable[..., Options]) -> None:
    for algorithm, entry in table_of(app).items():
        chosen = options(algorithm=algorithm)
        added = set(chosen.settings()) - FIRST_SETTINGS
        assert added == (set(ADDED) | {flag.name for flag in entry.flags if flag.shapes}) - FIRST_SETTINGS
        assert added <= {flag.name for flag in chosen.declared} | {"elastic"}


def test_a_run_from_before_an_option_was_added_is_gone_on_with(
    app: App, options: Callable[..., Options], tmp_path: Path
) -> None:
    straight = options(algorithm="gtopk", output=tmp_path / "straight")
    train(app, straight, 2)
    broken = replace(straight, output=tmp_path / "broken", checkpoint_every=2)
    assert killed_after(20, app, broken, 2)
    older(broken.output, *ADDED, "wire", "nonfinite")
    train(app, replace(broken, resume="latest"), 2)
    assert_same_bits(result(broken), result(straight))
    older(broken.output, *ADDED, "wire", "nonfinite")
    with pytest.raises(AgreedError, match=r"other settings \(--wire fp32 then, bf16 now\)"):
        train(app, replace(broken, resume="latest", own={**broken.own, "wire": "bf16"}), 2)


@pytest.mark.parametrize("flags", [{}, {"lr_schedule": "constant"}])
def test_a_finished_run_that_is_to_go_on_is_told_what_that_takes_from_the_start(
    app: App, options: Callable[..., Options], flags: dict[str, str]
) -> None:
    given = options(max_epochs=1)
    train(app, given, 1)
    longer = options(max_epochs=2, output=given.output, resume=True, **flags)
    with pytest.raises(
        AgreedError, match=r"only a run that had --lr-schedule constant, or --milestones, from its start"
    ):
        train(app, longer, 1)


def test_a_run_without_a_checkpoint_that_lacks_its_schedule_is_told_that_alone(
    app: App, options: Callable[..., Options]
) -> None:
    given = options(max_epochs=1, lr_schedule="constant")
    train(app, given, 1)
    shutil.rmtree(RunFolder(given.output).checkpoints.path)  # as one that was stopped before its first
    RunFolder(given.output).model.unlink()
    with pytest.raises(AgreedError, match=r"\(--lr-schedule constant then, \w+ now\): give the same flags again$"):
        train(app, options(max_epochs=2, output=given.output, resume=True), 1)


OLDER = {
    "dense": {"wire": "bf16"},
    "gtopk": {"density": 0.2},
    "spardl": {"teams": 2, "nworkers": 2, "density": 0.2, "wire": "int8", "clip_norm": 1, "nonfinite": "skip"},
}


@pytest.mark.parametrize("algorithm", OLDER)
def test_a_run_that_recorded_other_algorithms_flags_is_gone_on_with(
    app: App, options: Callable[..., Options], tmp_path: Path, algorithm: str
) -> None:
    """Files of the version that gave every run a density and a number of teams: stopped after step 4 of 6."""
    with zipfile.ZipFile(Path(__file__).parent / "older_runs.zip") as older_runs:
        older_runs.extractall(tmp_path)
    given = options(algorithm=algorithm, output=tmp_path / algorithm, resume=True, **OLDER[algorithm])
    train(app, given, 2)
    rows = read_metrics(given.output / "metrics.jsonl")
    assert [row["steps"] for row in rows] == [3, 6]
    assert all(isinstance(row["test_loss"], float) for row in rows)
    [*_, last] = RunFolder(given.output).checkpoints.complete()
    changed = replace(given, own={**given.own, "wire": "fp16"})
    with pytest.raises(AgreedError, match=r"other settings \(--wire"):
        train(app, changed, 2)
    settings = json.loads((last / "manifest.json").read_text())["content"]["settings"]
    assert settings == given.settings()
    assert set(settings) & {"density", "teams"} == set(OLDER[algorithm]) & {"density", "teams"}


def test_ranks_that_differ_in_whether_they_resume_say_so(app: App, options: Callable[..., Options]) -> None:
    train(app, options(), 2)

    def body(comm: Communicator) -> None:
        run(app, options(resume="latest") if comm.rank else options(overwrite=True), comm)

    with pytest.raises(AgreedError, match="rank 0 was started with --resume None, rank 1 with --resume latest"):
        SimulatedWorld(2).run(body)


def test_what_one_rank_cannot_load_is_refused_on_all_and_leaves_the_folder_as_it_was(
    app: App, options: Callable[..., Options], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = options(algorithm="gtopk", momentum=0.9)
    train(app, given, 2)
    before = {path: path.read_bytes() for path in sorted(given.output.rglob("*")) if path.is_file()}
    real_load = Replica.load_state_dict

    def load(replica: Replica, state: dict[str, Any]) -> None:
        real_load(replica, state)
        if replica.synchroniser.optimizer.comm.rank == 1:
            raise TypeError("what\nnobody foresaw")

    monkeypatch.setattr(Replica, "load_state_dict", load)
    with pytest.raises(AgreedError, match=r"rank1\.pt does not fit this run .TypeError: what"):
        train(app, replace(given, resume="latest"), 2)
    assert before == {path: path.read_bytes() for path in sorted(given.output.rglob("*")) if path.is_file()}
