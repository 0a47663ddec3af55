"""Time to quality: steps until a goal, seconds of phases, and what the page makes of them."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from communicators import Alone
from data_parallel import UpdateOptimizer, adam_step_correction
from hypothesis import given
from hypothesis import strategies as st
from sparse_collectives import Prediction

from bench.convergence.journal import key
from bench.convergence.quality import goal_of, steps_until
from bench.convergence.tasks import TASKS
from bench.convergence.ways import WAYS, Run
from bench.time_to_quality import command
from bench.time_to_quality import seconds as seconds_module
from bench.time_to_quality.best import best_of
from bench.time_to_quality.command import runs_of
from bench.time_to_quality.seconds import ALONE, JOURNAL, Case, Cell, case_of, phases, until

CELL = Cell("vit-digits", "adamw", 2, 100.0, 1.0)


def run_of(way, density=1.0, steps=100, task="vit-digits"):
    return Run(task, "adamw", way, density, 0.0, 2, 0, steps)


def test_the_goal_is_a_point_or_a_percent_of_the_loss_below():
    assert goal_of("vit-digits", [95.0, 97.0]) == 95.0
    assert math.log(goal_of("transformer-text", [4.0, 4.0])) == pytest.approx(1.01 * math.log(4))


def test_a_curve_reaches_the_goal_between_two_scores():
    curve = [[10, 50.0, 0, 0], [20, 70.0, 0, 0], [30, 90.0, 0, 0]]
    assert steps_until(curve, 75.0, text=False) == 22.5
    assert steps_until(curve, 50.0, text=False) == 10
    assert steps_until(curve, 40.0, text=False) == 10  # before the first score nothing is known
    assert steps_until(curve, 90.1, text=False) == math.inf
    perplexities = [[10, math.e**3, 0, 0], [20, math.e, 0, 0]]
    assert steps_until(perplexities, math.e**2, text=True) == pytest.approx(15)
    assert steps_until([[10, math.nan, 0, 0], [20, math.nan, 0, 0]], 2.0, text=True) == math.inf


def test_phases_are_dense_where_a_way_begins_so():
    assert phases(run_of("gtopk", 0.01)) == [Case("gtopk", 1.0)] * 10 + [Case("gtopk", 0.01)] * 90
    assert phases(run_of("spardl", 0.01))[9:11] == [Case("gtopk", 1.0), Case("spardl", 0.01)]
    assert phases(run_of("gtopk int8-packed", 0.01))[9:11] == [Case("gtopk int8-packed", d) for d in (1.0, 0.01)]
    assert (
        phases(run_of("torch PowerSGD hook rank 4"))
        == [Case("torch DDP")] * 10 + [Case("torch PowerSGD hook rank 4")] * 90
    )
    assert phases(run_of("powersgd rank 4"))[9:11] == [Case("dense"), Case("powersgd rank 4")]
    assert set(phases(run_of("torch bf16 hook"))) == {Case("torch bf16 hook")}
    assert set(phases(run_of("sparseloco", 0.021))) == {Case("sparseloco", 0.021)}
    densities = [case.density for case in phases(run_of("gtopk", 0.001))]
    assert densities == sorted(densities, reverse=True)
    assert densities[-80:] == [0.001] * 80


@given(st.floats(0.001, 1), st.floats(0.001, 1), st.integers(20, 300))
def test_seconds_add_up_over_the_phases(whole, sparse, steps):
    run = run_of("gtopk", 0.01, steps)
    seconds = {Case("gtopk", 1.0).name: [whole], Case("gtopk", 0.01).name: [sparse, sparse, sparse]}
    found, warm = until(run, seconds), steps // 10
    assert len(found) == steps + 1
    assert found[0] == 0
    assert found[-1] == pytest.approx(warm * whole + (steps - warm) * sparse)


def test_every_way_of_a_task_is_known_and_trained_alike():
    for task, of in TASKS.items():
        optimizer = command.OPTIMIZERS.get(task, "adamw")
        if optimizer not in of.rates:
            continue
        runs = runs_of(Cell(task, optimizer, 4, 100.0, 1.0), 2)
        assert {case.way for case in runs} <= WAYS.keys()
        assert Case(command.BF16) in runs
        for found in runs.values():
            assert [run.seed for run in found] == [0, 1]
            assert {run.steps for run in found} == {of.steps}


def said(algorithm, density=1.0, wire="fp32", **options):
    return Prediction(algorithm, 1000, density, wire, 0, 0, 0.0, 0.0, 0.0, 0.0, options)


def test_what_is_advised_is_the_case_that_trains_so():
    assert case_of(said("dense")) == Case("torch DDP")  # "leave it off" leaves DDP
    assert case_of(said("dense", wire="bf16")) == Case("dense bf16")
    assert case_of(said("torch-bf16")) == Case("torch bf16 hook")
    assert case_of(said("gtopk", 0.01)) == Case("gtopk", 0.01)
    assert case_of(said("spardl", 0.01, "int8-packed", teams=2)) == Case("spardl teams=2 int8-packed", 0.01)
    assert case_of(said("powersgd", rank=2)) == Case("powersgd")
    assert case_of(said("torch-powersgd", rank=8)) == Case("torch PowerSGD hook rank 8")
    assert case_of(said("local-sgd", sync_every=4, compress="int8")) == Case("local-sgd int8")
    assert case_of(said("torch-local-sgd", sync_every=4)) == Case("torch PostLocalSGD")
    assert case_of(said("eager-solo")) == Case("eager-solo")
    assert case_of(said("diloco", sync_every=7)) is None


def test_a_turn_is_whole_periods_that_last_long_enough_on_the_slowest_rank(monkeypatch):
    taken = []
    steps = SimpleNamespace(take=taken.append, seconds=lambda count: 0.001)
    monkeypatch.setattr("torch.distributed.all_reduce", lambda seconds, op: seconds.mul_(10))  # another rank is slower
    assert seconds_module._turn(steps, 1) == 200
    assert seconds_module._turn(steps, 3) == 201
    assert seconds_module._turn(steps, 500) == 500
    assert taken == [2, 1, 1]  # and its first period: three steps or more before anything is measured


def test_a_period_of_updates_has_one_step_in_which_ranks_speak_of_noise():
    assert seconds_module.UPDATES_PERIOD == adam_step_correction.EVERY
    model = torch.nn.Linear(2, 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    assert seconds_module._period("diloco", inner) == 30
    assert seconds_module._period("torch DDP", inner) == 1
    updates = UpdateOptimizer.for_model(inner, model, comm=Alone(), density=0.5)
    assert seconds_module._period("gtopk", updates) == adam_step_correction.EVERY


def row(way, library, seconds, *, link="a", advised=False):
    place = {"task": "t", "P": 2, "link": link, "goal": 1.0}
    return place | {"way": way, "library": library, "seconds": seconds, "advised": advised, "density": 1.0}


def test_the_best_of_each_line_and_how_many_times_as_long_others_take():
    rows = [
        row("torch bf16 hook", "torch", 10.0),
        row("torch PowerSGD hook", "torch", None),
        row("torch PowerSGD hook rank 4", "torch", 6.0),
        row("gtopk", "thinwire", 2.0),
        row("dense-int8", "thinwire", 5.0, advised=True),
        row("torch bf16 hook", "torch", 10.0, link="b"),
        row("torch PowerSGD hook", "torch", None, link="b"),
        row("gtopk", "thinwire", None, link="b"),
    ]
    first, second = best_of(rows)
    assert (first["ours"]["way"], first["powersgd"]["way"], first["advised"]["way"]) == (
        "gtopk",
        "torch PowerSGD hook rank 4",
        "dense-int8",
    )
    assert [first[name] for name in ("over_bf16", "over_powersgd", "over_torch", "late")] == [5.0, 3.0, 3.0, 2.5]
    assert first["behind"] == 5.0 / 6.0
    assert second["ours"] is second["powersgd"] is second["advised"] is None
    assert second["over_bf16"] == 0.0
    assert (first["tried"], second["tried"]) == (True, False)
    [lost] = best_of([row("dense-int8", "thinwire", None, advised=True), row("gtopk", "thinwire", 1.0)])
    assert (lost["tried"], lost["advised"], lost["late"]) == (True, None, math.inf)
    assert best_of([row("torch PowerSGD hook", "torch", None), row("gtopk", "thinwire", 1.0)])[0]["over_powersgd"] == (
        math.inf
    )


def test_long_tasks_are_shown_on_the_first_ranks_and_where_they_were_measured(tmp_path):
    measured_there = Cell("lstm-text", "adamw", 8, 100.0, 1.0)
    (tmp_path / JOURNAL).write_text(json.dumps({"cell": list(measured_there), "seconds": {}}) + "\n")
    asked = {"ranks": [4, 2, 8], "links": ["100 Mbit/s, 1 ms", "10 Mbit/s, 50 ms"], "output": tmp_path}
    cells = command._cells(SimpleNamespace(tasks=["lstm-text", "vit-digits"], **asked))
    long = [(cell.ranks, cell.mbit) for cell, _ in cells if cell.task == "lstm-text"]
    assert long == [(4, 100.0), (4, 10.0), (8, 100.0)]


@pytest.mark.few(0)
def test_what_is_on_record_is_neither_trained_nor_measured_again(tmp_path, monkeypatch, capsys):
    """And a way that does not reach the goal has no seconds; what was measured twice is compared."""
    runs = runs_of(CELL, 1)
    cases = list(dict.fromkeys(case for of in runs.values() for case in phases(of[0])))
    trainings = []
    for case, [run] in runs.items():
        score = 90.0 if case.way == "diloco" else 96.0
        curve = [[132, 80.0, 0, 0], [264, score, 0, 0]]
        fields = {name: getattr(run, name) for name in Run.__dataclass_fields__}
        trainings.append(fields | {"score": score, "curve": curve, "bytes_a_step": 1})
    (tmp_path / "convergence-runs.jsonl").write_text("".join(json.dumps(one) + "\n" for one in trainings))
    seconds = {case.name: [0.2 if case.way.startswith("torch") else 0.1] * 3 for case in [Case(ALONE), *cases]}
    before = seconds | {"gtopk at 0.01": [0.3] * 3, "spardl at 0.01": [0.1, 0.3, 0.3]}
    lines = [json.dumps({"cell": list(CELL), "seconds": of}) + "\n" for of in (before, seconds)]
    (tmp_path / JOURNAL).write_text("".join(lines))
    monkeypatch.setattr("bench.convergence.journal.trained", lambda run: pytest.fail(key(run)))
    monkeypatch.setattr("bench.time_to_quality.seconds._on_ranks", lambda *given: pytest.fail(str(given)))
    command.main(["--output", str(tmp_path)])
    found = json.loads((tmp_path / "time-to-quality.json").read_text())
    rows = {row["way"]: row for row in found["rows"]}
    assert rows["torch bf16 hook"]["seconds"] == pytest.approx(0.2 * 256, rel=0.02)  # 95 of 80 … 96
    assert rows["gtopk"]["over_bf16"] == pytest.approx(2.0)
    assert (rows["diloco"]["reached"], rows["diloco"]["seconds"], rows["diloco"]["over_bf16"]) == ("0/1", None, None)
    assert sum(row["advised"] for row in rows.values()) <= 1
    [again], ours = found["again"], [way for way in rows if not way.startswith("torch") and way != "diloco"]
    assert again["pairs"] == len(ours) * sum(way.startswith("torch") for way in rows)
    assert again["pairs"] - again["same"] == 2 * sum(way.startswith("torch") for way in rows)  # two were slower before
    assert "not reached" not in capsys.readouterr().err
