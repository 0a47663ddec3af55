"""The advise command without a cluster: what it says on three links, as text and JSON, and what it refuses."""

import json
import sys

import pytest
import torch
from communicators import Link, as_communicator
from sparse_collectives import ALGORITHMS
from sparse_collectives.prediction.calibration import MOST_MERGED, measure_handling
from sparse_collectives.prediction.cost import Handling
from thinwire.advice.command import main, parse
from thinwire.advice.ways import WAYS, Work

pytestmark = pytest.mark.quick

TRAINING = ["--parameters", "25e6", "--step-seconds", "0.5"]


def advice(capsys, *flags):
    assert main([*TRAINING, *flags, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


MEASURED = {}
FREE = {way.name: Work() for way in WAYS}


@pytest.fixture(autouse=True)
def _little_work(monkeypatch):
    """On few elements, and once for each situation: it takes a second, and the tests want any true numbers."""

    def measured(comm, **situation):
        key = repr(situation)
        if key not in MEASURED:
            MEASURED[key] = measure_handling(comm, **situation)
        return MEASURED[key]

    monkeypatch.setattr("sparse_collectives.prediction.calibration.MOST_ELEMENTS", 1 << 15)
    monkeypatch.setattr("sparse_collectives.prediction.measure_handling", measured)
    monkeypatch.setattr("thinwire.advice.measuring.measure_work", lambda shapes, device: FREE)


@pytest.mark.slow
def test_100gbit_leave_it_off(capsys):
    assert main([*TRAINING, "--link", "100gbit"]) == 0
    text = capsys.readouterr().out
    assert "Leave it off: the network is 1% of your step" in text
    assert "32 ranks, assumed to be joined by 100gbit: 5 µs a message, 100 Gbit/s" in text
    assert all(name in text for name in ALGORITHMS)


def test_wan_use_a_sparse_one(capsys, monkeypatch):
    free = Handling(0.0, {}, dict.fromkeys(ALGORITHMS, 0.0))
    monkeypatch.setattr("sparse_collectives.prediction.measure_handling", lambda comm, **situation: free)
    monkeypatch.setattr("thinwire.advice.measuring.measure_around", lambda *shapes, **asked: 0.0)  # on any machine
    found = advice(capsys, "--link", "wan", "--ranks", "8", "--optimizer", "adamw")
    recommended = found["recommendation"]
    assert ALGORITHMS[recommended["algorithm"]].selects
    assert recommended["speedup"] > 2
    assert recommended["speedup_after_warm_up"] > 5
    assert recommended["text"].startswith(f"Use {recommended['algorithm']}")
    assert "at density 0.01: over a whole training, the warm-up included, a step takes" in recommended["text"]
    assert f'algorithm="{recommended["algorithm"]}"' in recommended["text"]


@pytest.mark.slow
def test_1gbit_something_helps(capsys):
    recommended = advice(capsys, "--link", "1gbit", "--density", "0.001")["recommendation"]
    assert recommended["speedup"] > 1.5


@pytest.mark.slow
def test_json(capsys):
    few = ("--density", "0.01", "0.001", "0.01")
    found = advice(capsys, "--link", "10gbit", "--ranks", "14", *few, "--data", "text/recurrent")
    assert (found["data"], found["judged_by"]) == ("text/recurrent", "")  # of SGD on text nothing is on record
    numbers = ("nbytes", "rounds", "compression_seconds", "network_seconds", "merging_seconds", "step_seconds")
    speeds = ("mean_step_seconds", "steps_until_as_good", "speedup", "speedup_after_warm_up")
    assert set(found) == {
        *("parameters", "ranks", "device", "compute_seconds", "overlapped_seconds", "link", "pairs", "handling"),
        *("optimizer", "predictions", "recommendation", "taken_by_others", "warning", "seconds_per_byte", "unequal"),
        *("stragglers", "data", "judged_by"),
    }
    assert (found["parameters"], found["ranks"], found["pairs"]) == (25_000_000, 14, None)
    assert found["link"] == {"name": "10gbit", "alpha": 30e-6, "beta": 0.8e-9}
    assert [own["density"] for own in found["handling"]] == [0.01, 0.001]
    speedups = [p["speedup"] for p in found["predictions"]]
    assert speedups == sorted(speedups, reverse=True)
    for prediction in found["predictions"]:
        assert set(prediction) == {"algorithm", "options", "density", "wire", "accuracy", *speeds, *numbers}
    [dense] = [p for p in found["predictions"] if (p["algorithm"], p["wire"]) == ("dense", "fp32")]
    assert dense["speedup"] == 1
    assert set(found["recommendation"]) == {*found["predictions"][0], "rule", "reason", "runner_up", "text"}


@pytest.mark.slow
def test_without_overlap_a_step_is_the_sum_of_its_parts(capsys):
    found = advice(capsys, "--link", "1gbit", "--no-overlap")
    for p in found["predictions"]:
        parts = p["compression_seconds"] + p["network_seconds"] + p["merging_seconds"]
        hidden = min(0.5, p["network_seconds"]) if p["algorithm"] == "overlap-local-sgd" else 0.0
        assert p["step_seconds"] == pytest.approx(0.5 + parts - hidden)


@pytest.mark.slow
def test_plot(capsys, tmp_path, monkeypatch):
    figures = pytest.importorskip("matplotlib.figure")
    path, drawn, save = tmp_path / "speedup.png", [], figures.Figure.savefig
    monkeypatch.setattr(
        figures.Figure, "savefig", lambda figure, *to, **how: drawn.append(figure) or save(figure, *to, **how)
    )
    advice(capsys, "--link", "1gbit", "--density", "0.01", "--plot", str(path))
    assert path.stat().st_size > 10_000
    for axis in drawn[0].axes:
        low, high = axis.get_ylim()
        assert sum(low <= tick <= high for tick in axis.get_yticks()) >= 4  # each has its number


@pytest.fixture
def nothing_is_measured(monkeypatch):
    def measured(*args, **kwargs):
        raise AssertionError("measured before --plot was checked")

    monkeypatch.setattr("sparse_collectives.prediction.measure_handling", measured)


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


def test_a_measured_share_is_asked_of_every_stage(capsys, monkeypatch):
    shares = iter([0.0, 0.3, 0.6])
    monkeypatch.setattr("thinwire.advice.measuring.share_taken", lambda comm: next(shares))
    found = advice(capsys, "--link", "1gbit")
    assert found["taken_by_others"] == pytest.approx(0.3)
    assert "30% of the time" in found["warning"]


@pytest.mark.slow
def test_what_takes_long_is_told_on_stderr(capsys):
    assert main([*TRAINING, "--link", "1gbit", "--ranks", "100", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["ranks"] == 100
    told = [line.partition(": ")[2] for line in err.splitlines()]
    assert told == [
        "measuring selecting and merging at density 0.01 (1 of 2)",
        "measuring selecting and merging at density 0.001 (2 of 2)",
        "measuring the work of the other ways",
        "measuring the optimizer around a selection",
        "predicting steps of 100 ranks",
    ]


@pytest.mark.slow
@pytest.mark.few(2)
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


def test_times_and_shares_have_units_everywhere():
    flags = parse(["--parameters", "1e6", "--step-seconds", "250ms", "--link", "1gbit", "--density", "1%", "0.001"])
    assert (flags.step_seconds, flags.density) == (0.25, [0.01, 0.001])


def test_a_link_of_one_s_own_in_words(capsys):
    assert main([*TRAINING, "--bandwidth", "2gbit", "--latency", "1.5us", "--density", "0.01"]) == 0
    assert "32 ranks, assumed to be joined by 1.5 µs a message, 2 Gbit/s" in capsys.readouterr().out


@pytest.mark.slow
def test_half_of_a_gradient_is_measured_on_few_entries(monkeypatch):
    """All wires of all algorithms, some of which take microseconds an entry."""
    merged = []

    def counted(algorithm, wire, gradients, k, comm):
        merged.append(k)
        return 0.0

    monkeypatch.setattr("sparse_collectives.prediction.calibration._merging", counted)
    monkeypatch.setattr("sparse_collectives.prediction.calibration.MOST_ELEMENTS", 1 << 20)
    measure_handling(as_communicator(None), numel=1 << 22, density=0.5, device=torch.device("cpu"))
    assert set(merged) == {MOST_MERGED}


def test_one_rank_and_no_link(capsys):
    assert main(TRAINING) == 2
    assert "--link 100mbit|1gbit|10gbit" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "one of the arguments --model --parameters is required"),
        (["--parameters", "1e6"], "--parameters needs --step-seconds"),
        (["--parameters", "1.5", "--step-seconds", "1"], "whole number"),
        (["--parameters", "many", "--step-seconds", "1"], "many"),
        (["--parameters", "0", "--step-seconds", "1"], "whole number"),
        ([*TRAINING, "--step-seconds", "-1"], "seconds > 0"),
        ([*TRAINING, "--density", "0"], "0 < density < 1"),
        ([*TRAINING, "--density", "1"], "at 1 nothing is selected"),
        ([*TRAINING, "--density", "much"], "0 < density < 1, such as 1% or 0.01"),
        ([*TRAINING, "--density", "100%"], "at 1 nothing is selected"),
        ([*TRAINING, "--density", *(f"0.{n}" for n in range(101, 118))], "16 at most"),
        ([*TRAINING, "--step-seconds", "nan"], "seconds > 0, a time such as 250ms"),
        ([*TRAINING, "--step-seconds", "inf"], "seconds > 0"),
        (["--parameters", "nan", "--step-seconds", "1"], "whole number"),
        (["--parameters", "inf", "--step-seconds", "1"], "10,000,000,000,000 at most"),
        (["--parameters", "1e300", "--step-seconds", "1"], "10,000,000,000,000 at most"),
        ([*TRAINING, "--link", "1gbit", "--ranks", "1000000"], "4,096 at most"),
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


@pytest.mark.slow
def test_help(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["--help"])
    assert exit_.value.code == 0
    assert "mpiexec -n 8 python -m thinwire advise --model" in capsys.readouterr().out
