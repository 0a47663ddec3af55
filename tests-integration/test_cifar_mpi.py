"""The cifar app under real mpiexec: kill −9 and resume, and what a user can get wrong on four ranks."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
SCRIPT = HERE / "cifar_on_ranks.py"
pytestmark = pytest.mark.mpi


def without_seconds(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if "seconds" not in name} for row in rows]


def last_states(folder):
    newest = max(path.parent for path in folder.glob("checkpoints/*/manifest.json"))
    return [torch.load(newest / f"rank{rank}.pt", weights_only=True) for rank in range(4)]


def assert_same_bits(found, expected):
    """Tensors bit by bit; seconds, which no two runs share, left out."""
    if isinstance(expected, torch.Tensor):
        assert found.numpy().tobytes() == expected.numpy().tobytes()
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name in expected:
            if "seconds" not in str(name):
                assert_same_bits(found[name], expected[name])
    else:
        assert found == expected


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.mark.few(0)
def test_killed_three_times_in_mid_write_and_resumed_a_run_ends_in_the_same_bits(mpiexec, folder):
    chance = random.Random(0)
    kills = [(step, chance.randrange(4)) for step in sorted(chance.sample(range(6, 24, 3), 3))]
    for step, rank in kills:  # of a run of 24 steps with a checkpoint every three
        killed = mpiexec(4, SCRIPT, "killed", folder, step, rank)
        assert killed.returncode != 0
        assert (folder / "straight" / "model.pt").exists(), killed.stderr
        complete = sorted(path.parent.name for path in folder.glob("broken/checkpoints/*/manifest.json"))
        assert complete[-1] == f"{step - 3:08d}", killed.stderr
        assert (folder / "broken" / "checkpoints" / f"{step:08d}" / f"rank{rank}.pt").exists()
    resumed = mpiexec(4, SCRIPT, "resumed", folder)
    assert resumed.returncode == 0, resumed.stderr
    assert f"at step {kills[-1][0] - 3}\n" in (folder / "resumed.txt").read_text()
    straight, broken = folder / "straight", folder / "broken"
    assert without_seconds(broken) == without_seconds(straight)
    assert [row["epoch"] for row in without_seconds(broken)] == [1, 2]
    assert_same_bits(torch.load(broken / "model.pt"), torch.load(straight / "model.pt"))
    for found, expected in zip(last_states(broken), last_states(straight), strict=True):
        assert_same_bits(found, expected)


REFUSALS = {
    "unknown model": (2, "given 'vgg', expected one of 'resnet20', 'resnet32'"),
    "density above 1": (2, "given '1.5', expected 0 < density <= 1"),
    "density 0 on rank 2": (2, "given '0', expected 0 < density <= 1"),
    "other world size": (2, "--nworkers 3, but the launcher started 4"),
    "no data": (1, "test_batch}; get one of them from https://www.cs.toronto.edu/~kriz/cifar.html"),
    "truncated data": (1, "data_batch_1.bin has 30,729 bytes, expected a multiple of 3,073"),
    "other flags on rank 3": (1, "rank 0 was started with --lr 0.1, rank 3 with --lr 0.2"),
    "exists": (1, "already holds a run: give --resume"),
    "no data on rank 1": (1, "the disk of this machine is empty (on rank 1 of 4)"),
    "damaged checkpoint": (1, "rank3.pt is damaged"),
    "nan, dense": (1, "rank 0: the gradient of 'conv.weight' is not finite"),
    "nan, sparse": (1, "rank 0: the gradient of 'conv.weight' is not finite"),
    "other model on rank 1": (1, "ranks disagree"),
}


@pytest.fixture(scope="module")
def refused(mpiexec, folder):
    """A launch takes seconds to start, so one does all that can be done in one."""
    return mpiexec(4, SCRIPT, "refused", folder)


@pytest.fixture(scope="module")
def report(refused, folder):
    assert (folder / "report.json").exists(), refused.stderr
    return json.loads((folder / "report.json").read_text())


@pytest.mark.parametrize("case", REFUSALS)
def test_one_message_on_rank_0_and_the_same_exit_code_everywhere(report, case):
    code, says = REFUSALS[case]
    assert [code for code, _ in report[case]] == [code] * 4
    messages = [message for _, message in report[case]]
    assert messages[1:] == [""] * 3
    assert says in messages[0]
    assert re.fullmatch(r"thinwire_cifar: error: [^\n]+\n", messages[0])


@pytest.mark.parametrize("case", ["trains", "previous checkpoint"])
def test_between_the_refusals_it_trains(report, case):
    assert report[case] == [[0, ""]] * 4


def test_a_fault_on_one_rank_ends_the_job_with_its_traceback(refused):
    assert refused.returncode != 0
    assert refused.stderr.count("ZeroDivisionError: ours") == 1


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    command = [sys.executable, "-m", "thinwire_cifar.demo", "--nworkers", "2", "--max-epochs", "1", "--output", "shown"]
    environment = {**os.environ, "MPIEXEC_TIMEOUT": "100"}
    return folder, subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


def test_the_demo_starts_its_own_workers_and_shows_a_table_and_a_plot(demo):
    folder, launch = demo
    assert launch.returncode == 0, launch.stderr
    for expected in (
        "dense  epoch   1/1",
        "gtopk  epoch   1/1",
        "predicted",
        "shown/demo.png",
        "easured behind 100 Mbit/s",
    ):
        assert expected in launch.stdout
    assert (folder / "shown" / "demo.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.few(0)
def test_started_as_torchrun_does_it_trains_the_same_bits(demo, processes, tmp_path):
    folder, _ = demo
    flags = f"--algorithm gtopk --max-epochs 1 --output {tmp_path / 'run'}"
    for rank, launch in enumerate(processes(2, "-m", "cifar", *flags.split())):
        assert launch.returncode == 0, launch.stderr
        assert bool(launch.stdout) == (rank == 0)
    assert without_seconds(tmp_path / "run") == without_seconds(folder / "shown" / "gtopk")
