"""--model MODULE:FACTORY: what is measured of it, and what is said of the user's own errors."""

import json
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from communicators import SimulatedWorld
from thinwire.advice.command import main
from thinwire.advice.measuring import NoAdvice, device_of, measured_model, on_every_rank

pytestmark = pytest.mark.quick


@pytest.fixture(autouse=True)
def _little_work(monkeypatch):
    monkeypatch.setattr("sparse_collectives.prediction.calibration.MOST_ELEMENTS", 1 << 18)


@pytest.mark.slow
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
def lazy():
    return torch.nn.LazyLinear(3), lambda: torch.zeros(())
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
        ("lazy", "weight of a lazy layer has no shape yet: run one batch through the model first"),
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
    monkeypatch.setattr("sys.path", sys.path[:])
    monkeypatch.chdir(tmp_path)  # where the installed script finds it, too
    assert main(["--model", "broken:made", "--link", "1gbit"]) == 2
    assert f"importing broken raised {said.replace('FILE', str(tmp_path / 'broken.py'))}" in capsys.readouterr().err


def test_one_rank_s_failure_is_everybody_s():
    def fails(comm):
        def attempt():
            if comm.rank in (1, 3):
                raise NoAdvice(f"no data on {comm.rank}")
            return comm.rank

        with pytest.raises(NoAdvice, match=r"^rank 1: no data on 1$"):
            on_every_rank(attempt, comm)
        return on_every_rank(lambda: comm.rank, comm)

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
            measured_model("here:made", comm, torch.device("cpu"))
        return True

    monkeypatch.setattr("thinwire.advice.measuring._made", lambda *given: losses[threading.get_ident()])
    assert all(SimulatedWorld(3).run(body))


def test_models_of_unlike_size_are_refused(monkeypatch):
    made = {}

    def body(comm):
        made[threading.get_ident()] = torch.nn.Linear(2 + comm.rank, 1), None
        with pytest.raises(NoAdvice, match="3 to 5 trained parameters"):
            measured_model("here:made", comm, torch.device("cpu"))

    monkeypatch.setattr("thinwire.advice.measuring._made", lambda *given: made[threading.get_ident()])
    SimulatedWorld(3).run(body)


def test_ranks_take_the_gpus_of_a_machine_in_turn(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert [device_of(None, SimpleNamespace(rank=rank)).index for rank in range(5)] == [0, 1, 0, 1, 0]


def test_nothing_is_measured_on_the_meta_device():
    with pytest.raises(NoAdvice, match="--device meta: nothing can be measured there"):
        device_of("meta", SimpleNamespace(rank=0))
