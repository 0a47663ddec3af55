"""How well models learn, as `python -m bench convergence` measures it: what may stand in one table, and the record."""

import json
from dataclasses import asdict, replace

import pytest
import torch
from communicators import SimulatedWorld, run
from sparse_compress import topk
from thinwire.advice.accuracy import DATA, data_of

from bench.convergence.command import main as convergence
from bench.convergence.largest_of_the_sum import LargestOfTheSum
from bench.convergence.tasks import TASKS
from bench.convergence.training import LINKS, trained
from bench.convergence.ways import Run


@pytest.mark.few(0)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_plain_ddp_has_the_scores_of_the_simulated_dense_way(optimizer):
    """So that torch's hooks, which take real ranks only, can stand beside what simulated ones learn."""
    run = Run("resnet20-digits", optimizer, "dense", 1.0, 0.5, 2, 1, 12)
    ours, theirs = trained(run), trained(replace(run, way="torch DDP"))
    assert [point[:2] for point in theirs["curve"]] == [point[:2] for point in ours["curve"]]
    assert theirs["bytes_a_step"] == pytest.approx(ours["bytes_a_step"], rel=0.01)


@pytest.mark.few(0)
@pytest.mark.parametrize("way", ["torch bf16 hook", "torch PowerSGD hook"])
def test_torchs_hooks_train_and_send_less(way):
    run = Run("cnn-digits", "sgd", way, 1.0, 0.0, 2, 0, 60)
    found, whole = trained(run), trained(replace(run, way="dense"))  # the scores of plain DDP
    assert [point[1] for point in found["curve"]] != [point[1] for point in whole["curve"]]
    assert found["score"] > 40
    assert found["bytes_a_step"] <= whole["bytes_a_step"] / 2


def test_sparseloco_sends_at_the_ends_of_blocks_alone_and_the_agreed_model_is_scored():
    found = trained(Run("vit-digits", "adamw", "sparseloco", 0.01, 0.0, 2, 0, 12))
    sent = {step: nbytes for step, _, nbytes, _ in found["curve"]}
    scores = {step: score for step, score, *_ in found["curve"]}
    assert sent[2] == sent[4] == 0
    assert 0 < sent[6] == sent[8] < sent[10] < sent[12]
    assert scores[6] == scores[8]  # in the second block nothing is agreed anew
    dense = trained(Run("vit-digits", "adamw", "dense", 1.0, 0.0, 2, 0, 2))["bytes_a_step"]
    assert found["bytes_a_step"] < 0.002 * dense


def test_a_training_whose_bytes_on_the_way_are_not_in_the_record_is_made_anew_and_its_bytes_count(tmp_path):
    run = Run("cnn-digits", "sgd", "dense", 1.0, 0.0, 2, 0, 12)
    old = {"score": 1.0, "curve": [[12, 1.0]], "bytes_a_step": 1} | {f"network_seconds_{name}": 1.0 for name in LINKS}
    journal = tmp_path / "convergence-runs.jsonl"
    journal.write_text("".join(json.dumps(asdict(replace(run, seed=seed)) | old) + "\n" for seed in (0, 1)))
    for _ in range(2):  # the second time it is whole
        asked = ["--tasks", "cnn-digits", "--optimizers", "sgd", "--ways", "dense", "--steps", "12"]
        convergence([*asked, "--output", str(tmp_path)])
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    assert [(line["seed"], line["score"] == 1.0) for line in lines] == [(0, True), (1, True), (0, False)]
    [row] = json.loads((tmp_path / "convergence.json").read_text())["rows"]
    assert (row["seeds"], row["bytes_a_step"]) == (2, lines[-1]["bytes_a_step"])


def test_an_optimizer_that_is_for_none_of_the_tasks_is_told(tmp_path):
    with pytest.raises(SystemExit, match=r"none of --optimizers \['muon'\] is for --tasks \['cnn-digits'\]"):
        convergence(["--tasks", "cnn-digits", "--optimizers", "muon", "--output", str(tmp_path)])


@pytest.mark.parametrize("size", [1, 3, 8])
def test_the_largest_of_the_sum_are_those_of_all_that_ranks_have(size):
    dense = list(torch.randint(-99, 99, (size, 40), generator=torch.Generator().manual_seed(size)).float())
    way = LargestOfTheSum()
    everything, whole = way.select(dense[0], 0, size, 3, None), sum(dense)
    world = SimulatedWorld(size)
    results = world.run(lambda comm: run(way.call(everything(dense[comm.rank]), comm, 3), comm, facts=""))
    for result in results:
        assert torch.equal(result.total.to_dense(), topk(whole, 3).to_dense())
    assert torch.equal(whole, results[0].total.to_dense() + sum(result.dropped.to_dense() for result in results))


def test_tasks_are_of_a_kind_that_advise_knows():
    """Which it finds by the layers, where those say one."""
    assert {task.data for task in TASKS.values()} <= set(DATA)
    assert {name: data_of(task.model()) for name, task in TASKS.items()} == {
        name: "" if name == "vit-digits" else task.data for name, task in TASKS.items()
    }
