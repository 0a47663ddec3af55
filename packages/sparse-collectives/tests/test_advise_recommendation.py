"""What advise says of its choice, and of the machine on which it measured."""

import json
from importlib.resources import files

import pytest
import torch
from communicators import Link, SimulatedWorld
from sparse_collectives import ALGORITHMS, DistributedOptimizer
from sparse_collectives.advise.accuracy import in_a_column, known
from sparse_collectives.advise.busy import PROBE_SECONDS, share_taken
from sparse_collectives.advise.flags import OPTIMIZERS
from sparse_collectives.advise.recommendation import recommend
from sparse_collectives.advise.report import as_json, as_text
from sparse_collectives.advise.situation import Situation
from sparse_collectives.prediction.cost import Handling
from sparse_collectives.wire.wire import WIRES


def situation(**changes):
    """25 M parameters on 8 ranks over 1 Gbit/s; merging costs nothing."""
    merge = {name if wire == "fp32" else f"{name} in {wire}": 0.0 for name in ALGORITHMS for wire in WIRES}
    known = {
        "numel": 25_000_000,
        "ranks": 8,
        "device": "cpu",
        "compute": 0.3,
        "hidden": 0.0,
        "link": Link(50e-6, 8e-9),
        "link_name": "given",
        "pairs": None,
        "handling": {density: Handling(0.0, {}, merge) for density in (0.01, 0.001)},
    }
    return Situation(**{**known, **changes})


@pytest.mark.parametrize(
    ("changes", "rule", "said"),
    [
        ({}, "as fast", "of steps that are as fast within 5% the one that sends most of the gradient"),
        ({"handling": {0.01: Handling(0.0, {}, dict.fromkeys(ALGORITHMS, 0.0))}}, "fastest", "it is the fastest"),
        ({"compute": 1e3}, "not worthwhile", "a gain below 10% is not worth a change"),
    ],
)
def test_the_reason_says_which_rule_decided_and_what_came_next(changes, rule, said):
    found = situation(**changes)
    recommended, steps = recommend(found), found.predictions()
    fastest = steps[0][0]
    assert recommended.rule == rule
    assert said in recommended.reason
    assert recommended.reason in as_text(found)
    taken = (recommended.algorithm, recommended.density, recommended.wire)
    others = [(p, step) for p, step in steps if (p.algorithm, p.density, p.wire) != taken]
    assert len(others) == len(steps) - 1
    runner_up, step = others[0]
    assert recommended.runner_up["step_seconds"] == step
    assert recommended.runner_up["algorithm"] == runner_up.algorithm
    assert runner_up.name in recommended.reason
    assert (taken == (fastest.algorithm, fastest.density, fastest.wire)) == (rule == "fastest")
    told = json.loads(as_json(found))["recommendation"]
    assert (told["rule"], told["reason"], told["runner_up"]) == (rule, recommended.reason, recommended.runner_up)


@pytest.mark.parametrize(("taken", "busy"), [(0.0, False), (0.09, False), (0.5, True), (1.0, True)])
def test_a_busy_machine_is_said(taken, busy):
    found = situation(taken=taken)
    told = json.loads(as_json(found))
    assert told["taken_by_others"] == taken
    assert ("the machine was busy" in as_text(found)) == busy == (told["warning"] is not None)
    if taken == 0.5:
        assert "50% of the time" in told["warning"]
        assert "2.0 times too long" in told["warning"]


def test_the_share_that_others_took_is_the_worst_rank_s():
    def body(comm):
        now = [0.0]

        def clock():
            now[0] += PROBE_SECONDS / 64
            return now[0]

        return share_taken(comm, clock=clock, cpu=lambda: now[0] * (1 - 0.25 * comm.rank))

    assert SimulatedWorld(3).run(body) == pytest.approx([0.5] * 3)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_lines_are_for_the_optimizer_that_was_asked_for(optimizer):
    text = recommend(situation(optimizer=optimizer)).text
    adaptive = optimizer != "sgd"
    assert ('sends="updates"' in text) == adaptive
    assert ("momentum=0.9" in text) == (not adaptive)
    assert ("sparse_hook" in text) == (not adaptive)
    assert ("with optimizer.ahead():" in text) == adaptive
    assert "WarmUp(" in text


def test_what_is_summed_whole_beside_updates_is_in_the_bytes():
    """As a simulated exchange counts them, by the busiest rank; gradients are sent without."""
    sizes = {"weight": 3000, "bias": 100, "norm": 8}

    def body(comm):
        model = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.zeros(n)) for name, n in sizes.items()})
        optimizer = DistributedOptimizer(
            torch.optim.AdamW(model.parameters()),
            model.named_parameters(),
            comm=comm,
            sends="updates",
            dense_below=256,
            density=0.01,
        )
        sent = comm.bytes_sent
        with optimizer.ahead():
            for p in model.values():
                p.grad = torch.randn(p.shape)
        optimizer.step()
        return comm.bytes_sent - sent

    for ranks in (2, 3, 4):
        given = {"numel": sum(sizes.values()), "ranks": ranks, "handling": {0.01: Handling(0.0, {}, {"gtopk": 0.0})}}
        told = {
            (optimizer, tiny): next(
                p
                for p, _ in situation(optimizer=optimizer, tiny=tiny, **given).predictions()
                if (p.algorithm, p.wire) == ("gtopk", "fp32")
            )
            for optimizer in ("adamw", "sgd")
            for tiny in (0, 108)
        }
        assert told["adamw", 108].nbytes == max(SimulatedWorld(ranks).run(body))
        assert told["adamw", 108].rounds > told["adamw", 0].rounds
        assert told["adamw", 108].latency > told["adamw", 0].latency
        assert told["sgd", 108] == told["sgd", 0] == told["adamw", 0]


def test_updates_are_there_when_backward_has_ended_and_hide_nothing():
    hidden = {"hidden": 0.2, "handling": {0.01: Handling(0.0, {}, dict.fromkeys(ALGORITHMS, 0.0))}}
    sgd, adamw = (
        {p.name: step for p, step in situation(optimizer=name, **hidden).predictions()} for name in ("sgd", "adamw")
    )
    assert adamw["dense"] == sgd["dense"]
    assert adamw["gtopk"] > sgd["gtopk"]


def test_what_is_known_of_accuracy_is_the_shipped_record():
    """Beside each speed-up, and "?" for what nobody measured."""
    rows = json.loads((files("sparse_collectives.advise") / "accuracy.json").read_text())["rows"]
    for row in rows:
        found = known(row["optimizer"], row["algorithm"], row["density"], row["wire"])
        assert found.least <= row["behind"] <= found.most
        assert row["task"] in found.tasks
        assert found.seeds <= row["seeds"]
    assert known("sgd", "gtopk", 0.123, "fp32") is None
    assert in_a_column(None) == "?"
    found = situation(optimizer="adamw")
    text, told = as_text(found), json.loads(as_json(found))
    shown = {(p["algorithm"], p["density"], p["wire"]): p["accuracy"] for p in told["predictions"]}
    assert shown["gtopk", 0.01, "fp32"] == json.loads(json.dumps(known("adamw", "gtopk", 0.01, "fp32")._asdict()))
    assert in_a_column(known("adamw", "gtopk", 0.01, "fp32")) in text
    assert told["optimizer"] == "adamw"
