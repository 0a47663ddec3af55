"""The advise command without a cluster: what it says on three links, as text and JSON, and what it refuses."""

import json
import sys
import threading

import pytest
import torch
from communicators import Link, SimulatedWorld, as_communicator
from sparse_collectives import ALGORITHMS
from sparse_collectives.advise.__main__ import main
from sparse_collectives.advise.agreement import NoAdvice, all_or_none
from sparse_collectives.advise.busy import PROBE_SECONDS, share_taken
from sparse_collectives.advise.factory import model_seconds
from sparse_collectives.advise.recommendation import recommend
from sparse_collectives.advise.report import as_json, as_text
from sparse_collectives.advise.situation import Situation
from sparse_collectives.calibration import MOST_MERGED, measure_handling
from sparse_collectives.cost import Handling
from sparse_collectives.wire import WIRES

TRAINING = ["--parameters", "25e6", "--step-seconds", "0.5"]


def advice(capsys, *flags):
    assert main([*TRAINING, *flags, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture(autouse=True)
def _little_work(monkeypatch):
    monkeypatch.setattr("sparse_collectives.calibration.MOST_ELEMENTS", 1 << 18)


def test_100gbit_leave_it_off(capsys):
    assert main([*TRAINING, "--link", "100gbit"]) == 0
    text = capsys.readouterr().out
    assert "Leave it off: the network is 1% of your step" in text
    assert "32 ranks, assumed to be joined by 100gbit: 5 µs a message, 100 Gbit/s" in text
    assert all(name in text for name in ALGORITHMS)


def test_wan_use_a_sparse_one(capsys):
    found = advice(capsys, "--link", "wan", "--ranks", "8")
    recommended = found["recommendation"]
    assert ALGORITHMS[recommended["algorithm"]].compresses
    assert recommended["speedup"] > 5
    assert recommended["text"].startswith(f"Use {recommended['algorithm']}")
    assert "at density 0.001: a step takes" in recommended["text"]
    assert f'algorithm="{recommended["algorithm"]}"' in recommended["text"]


def test_1gbit_something_helps(capsys):
    recommended = advice(capsys, "--link", "1gbit", "--density", "0.001")["recommendation"]
    assert recommended["speedup"] > 1.5


def test_json(capsys):
    found = advice(capsys, "--link", "10gbit", "--ranks", "14", "--density", "0.01", "0.001", "0.01")
    numbers = ("nbytes", "rounds", "compression_seconds", "network_seconds", "merging_seconds", "step_seconds")
    assert set(found) == {
        *("parameters", "ranks", "device", "compute_seconds", "overlapped_seconds", "link", "pairs", "handling"),
        *("predictions", "recommendation", "taken_by_others", "warning"),
    }
    assert (found["parameters"], found["ranks"], found["pairs"]) == (25_000_000, 14, None)
    assert found["link"] == {"name": "10gbit", "alpha": 30e-6, "beta": 0.8e-9}
    assert [own["density"] for own in found["handling"]] == [0.01, 0.001]
    steps = [p["step_seconds"] for p in found["predictions"]]
    assert steps == sorted(steps)
    for prediction in found["predictions"]:
        assert set(prediction) == {"algorithm", "options", "density", "wire", "speedup", *numbers}
    [dense] = [p for p in found["predictions"] if (p["algorithm"], p["wire"]) == ("dense", "fp32")]
    assert dense["speedup"] == 1
    assert set(found["recommendation"]) == {
        *("algorithm", "options", "density", "wire", "speedup", "rule", "reason", "runner_up", "text")
    }


def test_without_overlap_a_step_is_the_sum_of_its_parts(capsys):
    found = advice(capsys, "--link", "1gbit", "--no-overlap")
    for p in found["predictions"]:
        parts = p["compression_seconds"] + p["network_seconds"] + p["merging_seconds"]
        assert p["step_seconds"] == pytest.approx(0.5 + parts)


def test_plot(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "speedup.png"
    advice(capsys, "--link", "1gbit", "--plot", str(path))
    assert path.stat().st_size > 10_000


@pytest.fixture
def nothing_is_measured(monkeypatch):
    def measured(*args, **kwargs):
        raise AssertionError("measured before --plot was checked")

    monkeypatch.setattr("sparse_collectives.advise.situation.measure_handling", measured)


def test_plot_without_matplotlib_says_what_to_install(capsys, tmp_path, monkeypatch, nothing_is_measured):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main([*TRAINING, "--link", "1gbit", "--plot", str(tmp_path / "x.png")]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("x.bmp", "expected a file name that ends in"),
        ("x", "expected a file name that ends in"),
        ("missing/x.png", "there is no folder"),
        ("folder.png", "cannot be written there"),
    ],
)
def test_plot_is_checked_first(capsys, tmp_path, nothing_is_measured, name, said):
    pytest.importorskip("matplotlib")
    (tmp_path / "folder.png").mkdir()
    assert main([*TRAINING, "--link", "1gbit", "--plot", str(tmp_path / name)]) == 2
    assert said in capsys.readouterr().err


def test_model_is_measured(capsys, tmp_path, monkeypatch):
    (tmp_path / "tiny_model.py").write_text(
        "import torch\n"
        "def tiny():\n"
        "    model, batch = torch.nn.Linear(30, 10), torch.randn(4, 30)\n"
        "    print('made')\n"
        "    return model, lambda: print('batch') or model(batch).square().mean()\n"
        "def wrong():\n"
        "    return torch.nn.Linear(3, 1)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["--model", "tiny_model:tiny", "--link", "1gbit", "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)  # what the factory prints is not in the way
    assert "made\n" in err
    assert "batch\n" in err
    assert found["parameters"] == 310
    assert 0 < found["overlapped_seconds"] < found["compute_seconds"]
    assert main(["--model", "tiny_model:wrong", "--link", "1gbit"]) == 2
    assert "expected (model, loss)" in capsys.readouterr().err
    assert main(["--model", "tiny_model:nothing", "--link", "1gbit"]) == 2
    assert "nothing" in capsys.readouterr().err


FACTORIES = """import torch
def loss():
    raise ValueError("no such file:\\n data.csv")
def raises():
    return loss()
def leaves():
    raise SystemExit("bye")
def loss_raises():
    return torch.nn.Linear(3, 1), loss
def detached():
    return torch.nn.Linear(3, 1), lambda: torch.zeros(())
def frozen():
    return torch.nn.Linear(3, 1).requires_grad_(False), lambda: torch.zeros(())
"""


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        ("raises", "raises() raised ValueError: no such file: (FILE, line 3)"),
        ("leaves", "leaves() raised SystemExit: bye (FILE, line 7)"),
        ("loss_raises", "loss() raised ValueError: no such file: (FILE, line 3)"),
        ("detached", "backward of what loss() returned raised RuntimeError: element 0"),
        ("frozen", "no parameter of the model requires a gradient"),
        ("torch", "no function torch"),
    ],
)
def test_errors_of_a_factory_are_one_line_with_its_place(capsys, tmp_path, monkeypatch, factory, said):
    name = f"factories_{factory}"
    (tmp_path / f"{name}.py").write_text(FACTORIES)
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["--model", f"{name}:{factory}", "--link", "1gbit"]) == 2
    *progress, line = capsys.readouterr().err.splitlines()
    assert all("measuring" in text for text in progress)
    assert f"--model {name}:{factory}: " in line
    assert said.replace("FILE", str(tmp_path / f"{name}.py")) in line


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import nowhere_at_all", "ModuleNotFoundError: No module named 'nowhere_at_all' (FILE, line 1)"),
        ("1 / 0", "ZeroDivisionError: division by zero (FILE, line 1)"),
        ("\ndef made(:", "SyntaxError: invalid syntax (FILE, line 2)"),
    ],
)
def test_errors_of_importing_a_factory(capsys, tmp_path, monkeypatch, source, said):
    (tmp_path / "broken.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["--model", "broken:made", "--link", "1gbit"]) == 2
    assert f"importing broken raised {said.replace('FILE', str(tmp_path / 'broken.py'))}" in capsys.readouterr().err


def test_one_rank_s_failure_is_everybody_s():
    def fails(comm):
        def attempt():
            if comm.rank in (1, 3):
                raise NoAdvice(f"no data on {comm.rank}")
            return comm.rank

        with pytest.raises(NoAdvice, match=r"^rank 1: no data on 1$"):
            all_or_none(attempt, comm)
        return all_or_none(lambda: comm.rank, comm)

    assert SimulatedWorld(4).run(fails) == [0, 1, 2, 3]


@pytest.mark.parametrize("good", [0, 1, 3])
def test_a_loss_that_fails_on_one_rank_ends_all(monkeypatch, good):
    """Whenever it does: data may be short, a device's memory full."""
    losses = {}

    def made(comm):
        model, left = torch.nn.Linear(3, 1), [None] * (good if comm.rank == 2 else 9)

        def loss():
            left.pop()
            return model(torch.ones(1, 3)).sum()

        return model, loss

    def body(comm):
        losses[threading.get_ident()] = made(comm)
        with pytest.raises(NoAdvice, match=r"^rank 2: --model here:made: loss\(\) raised IndexError: pop from empty"):
            model_seconds("here:made", comm, torch.device("cpu"))
        return True

    monkeypatch.setattr("sparse_collectives.advise.factory._made", lambda *given: losses[threading.get_ident()])
    assert all(SimulatedWorld(3).run(body))


def test_models_of_unlike_size_are_refused(monkeypatch):
    made = {}

    def body(comm):
        made[threading.get_ident()] = torch.nn.Linear(2 + comm.rank, 1), None
        with pytest.raises(NoAdvice, match="3 to 5 trained parameters"):
            model_seconds("here:made", comm, torch.device("cpu"))

    monkeypatch.setattr("sparse_collectives.advise.factory._made", lambda *given: made[threading.get_ident()])
    SimulatedWorld(3).run(body)


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


def test_a_measured_share_is_asked_of_every_stage(capsys, monkeypatch):
    shares = iter([0.0, 0.3, 0.6])
    monkeypatch.setattr("sparse_collectives.advise.situation.share_taken", lambda comm: next(shares))
    found = advice(capsys, "--link", "1gbit")
    assert found["taken_by_others"] == pytest.approx(0.3)
    assert "30% of the time" in found["warning"]


def test_what_takes_long_is_told_on_stderr(capsys):
    assert main([*TRAINING, "--link", "1gbit", "--ranks", "1000", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["ranks"] == 1000
    told = [line.partition(": ")[2] for line in err.splitlines()]
    assert told == [
        "measuring selecting and merging at density 0.01 (1 of 2)",
        "measuring selecting and merging at density 0.001 (2 of 2)",
        "predicting steps of 1000 ranks",
    ]


@pytest.mark.parametrize(
    ("rate", "time", "link"),
    [
        ("1gbit", "50us", Link(50e-6, 8e-9)),
        ("1", "50e-6", Link(50e-6, 8e-9)),
        ("200 Mbit/s", "0.05 ms", Link(50e-6, 40e-9)),
        ("0.5Tbit", "0", Link(0.0, 0.016e-9)),
    ],
)
def test_a_link_of_one_s_own(capsys, rate, time, link):
    found = advice(capsys, "--bandwidth", rate, "--latency", time, "--ranks", "4", "--density", "0.01")
    assert found["link"]["name"] == "given"
    assert (found["link"]["alpha"], found["link"]["beta"]) == pytest.approx((link.alpha, link.beta))
    assert found["ranks"] == 4


def test_a_link_of_one_s_own_in_words(capsys):
    assert main([*TRAINING, "--bandwidth", "2gbit", "--latency", "1.5us", "--density", "0.01"]) == 0
    assert "32 ranks, assumed to be joined by 1.5 µs a message, 2 Gbit/s" in capsys.readouterr().out


def test_half_of_a_gradient_is_measured_on_few_entries(monkeypatch):
    """All wires of all algorithms, some of which take microseconds an entry."""
    merged = []

    def counted(algorithm, wire, gradients, k, comm, repeats):
        merged.append(k)
        return 0.0

    monkeypatch.setattr("sparse_collectives.calibration._merging", counted)
    monkeypatch.setattr("sparse_collectives.calibration.MOST_ELEMENTS", 1 << 20)
    measure_handling(as_communicator(None), numel=1 << 22, density=0.5, device=torch.device("cpu"))
    assert set(merged) == {MOST_MERGED}


def test_one_rank_and_no_link(capsys):
    assert main(TRAINING) == 2
    assert "--link 1gbit|10gbit" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "one of the arguments --model --parameters is required"),
        (["--parameters", "1e6"], "--parameters needs --step-seconds"),
        (["--parameters", "1.5", "--step-seconds", "1"], "whole number"),
        (["--parameters", "many", "--step-seconds", "1"], "many"),
        (["--parameters", "0", "--step-seconds", "1"], "whole number"),
        ([*TRAINING, "--step-seconds", "-1"], "seconds > 0"),
        ([*TRAINING, "--density", "0"], "0 < density <= 1"),
        ([*TRAINING, "--density", "nan"], "0 < density <= 1"),
        ([*TRAINING, "--density", "much"], "0 < density <= 1"),
        ([*TRAINING, "--density", *(f"0.{n}" for n in range(101, 118))], "16 at most"),
        ([*TRAINING, "--step-seconds", "nan"], "seconds > 0"),
        ([*TRAINING, "--step-seconds", "inf"], "seconds > 0"),
        (["--parameters", "nan", "--step-seconds", "1"], "whole number"),
        (["--parameters", "inf", "--step-seconds", "1"], "1,000,000,000,000,000 at most"),
        (["--parameters", "1e300", "--step-seconds", "1"], "1,000,000,000,000,000 at most"),
        ([*TRAINING, "--link", "1gbit", "--ranks", "1000000"], "10,000 at most"),
        ([*TRAINING, "--link", "1gbit", "--bandwidth", "1gbit"], "--link stands for"),
        ([*TRAINING, "--link", "1gbit", "--latency", "0"], "--link stands for"),
        ([*TRAINING, "--bandwidth", "1gbit"], "--bandwidth and --latency go together"),
        ([*TRAINING, "--latency", "50us"], "--bandwidth and --latency go together"),
        ([*TRAINING, "--bandwidth", "0", "--latency", "50us"], "a number alone is Gbit/s"),
        ([*TRAINING, "--bandwidth", "1e9", "--latency", "50us"], "a number alone is Gbit/s"),
        ([*TRAINING, "--bandwidth", "nan", "--latency", "50us"], "a rate such as 1gbit"),
        ([*TRAINING, "--bandwidth", "1GB", "--latency", "50us"], "a rate such as 1gbit"),
        ([*TRAINING, "--bandwidth", "gbit", "--latency", "50us"], "a rate such as 1gbit"),
        ([*TRAINING, "--bandwidth", "1gbit", "--latency=-1us"], "expected 0 to 60 s"),
        ([*TRAINING, "--bandwidth", "1gbit", "--latency", "100"], "a number alone is seconds"),
        ([*TRAINING, "--bandwidth", "1gbit", "--latency", "soon"], "a time such as 50us"),
        ([*TRAINING, "--link", "2gbit"], "invalid choice"),
        ([*TRAINING, "--ranks", "8"], "--ranks goes with --link"),
        ([*TRAINING, "--link", "1gbit", "--ranks", "1"], "one rank exchanges nothing"),
        (["--model", "module"], "MODULE:FACTORY"),
        (["--model", "a:b", "--step-seconds", "1"], "leave it out"),
    ],
)
def test_bad_flags(capsys, flags, said):
    with pytest.raises(SystemExit) as exit_:
        main(flags)
    assert exit_.value.code == 2
    assert said in capsys.readouterr().err


def test_help(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["--help"])
    assert exit_.value.code == 0
    assert "mpiexec -n 8 python -m sparse_collectives.advise --model" in capsys.readouterr().out
