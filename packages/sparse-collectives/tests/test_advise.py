"""The advise command without a cluster: what it says on three links, as text and JSON, and what it refuses."""

import json
import sys

import pytest
from sparse_collectives import ALGORITHMS
from sparse_collectives.advise.__main__ import main

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
        *("predictions", "recommendation"),
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
    assert set(found["recommendation"]) == {"algorithm", "options", "density", "wire", "speedup", "text"}


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


def test_plot_without_matplotlib_says_what_to_install(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main([*TRAINING, "--link", "1gbit", "--plot", str(tmp_path / "x.png")]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


def test_model_is_measured(capsys, tmp_path, monkeypatch):
    (tmp_path / "tiny_model.py").write_text(
        "import torch\n"
        "def tiny():\n"
        "    model, batch = torch.nn.Linear(30, 10), torch.randn(4, 30)\n"
        "    return model, lambda: model(batch).square().mean()\n"
        "def wrong():\n"
        "    return torch.nn.Linear(3, 1)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["--model", "tiny_model:tiny", "--link", "1gbit", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parameters"] == 310
    assert 0 < found["overlapped_seconds"] < found["compute_seconds"]
    assert main(["--model", "tiny_model:wrong", "--link", "1gbit"]) == 2
    assert "expected (model, loss)" in capsys.readouterr().err
    assert main(["--model", "tiny_model:nothing", "--link", "1gbit"]) == 2
    assert "nothing" in capsys.readouterr().err


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
