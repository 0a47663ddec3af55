"""The text app on real ranks: its own launch, torchrun's, and kill −9 in the middle of an epoch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parent / "text_on_ranks.py"
TRAIN = "--dataset pydoc --dnn lstm-small --hidden 16 --batch-size 64 --max-epochs 1 --algorithm gtopk"
pytestmark = pytest.mark.mpi


def without_seconds(folder):
    [row] = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {name: value for name, value in row.items() if "seconds" not in name}


def assert_same_models(found, expected):
    found, expected = (torch.load(folder / "model.pt", weights_only=True) for folder in (found, expected))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Started by the program itself."""
    folder = tmp_path_factory.mktemp("text")
    command = [sys.executable, "-m", "text", *TRAIN.split(), "--nworkers", "2", "--output", "straight"]
    environment = {**os.environ, "MPIEXEC_TIMEOUT": "200"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert "perplexity" in done.stdout
    return folder / "straight"


@pytest.mark.few(0)
def test_killed_in_the_middle_of_an_epoch_and_resumed_a_run_ends_in_the_same_bits(straight, mpiexec):
    """With hidden state, dropout and residuals."""
    broken = straight.parent / "broken"
    flags = [*TRAIN.split(), "--output", broken, "--checkpoint-every", "4"]
    killed = mpiexec(2, SCRIPT, 8, *flags, timeout=200)
    assert killed.returncode != 0
    complete = sorted(path.parent.name for path in broken.glob("checkpoints/*/manifest.json"))
    assert complete == [f"{4:08d}"], killed.stderr
    resumed = mpiexec(2, "-m", "text", *flags, "--resume", timeout=200)
    assert resumed.returncode == 0, resumed.stderr
    assert "at step 4" in resumed.stdout
    assert without_seconds(broken) == without_seconds(straight)
    assert_same_models(broken, straight)


@pytest.mark.few(0)
def test_started_as_torchrun_does_it_trains_the_same_bits(straight, processes, tmp_path):
    for launch in processes(2, "-m", "text", *TRAIN.split(), "--output", tmp_path / "run", timeout=200):
        assert launch.returncode == 0, launch.stderr
    assert without_seconds(tmp_path / "run") == without_seconds(straight)
    assert_same_models(tmp_path / "run", straight)


@pytest.mark.few(0)
def test_what_was_trained_goes_on_with_a_prompt(straight, forked, tmp_path):
    words = ["-m", "text", "generate", straight, "--prompt", "The statement", "--length", "8"]
    [done] = forked(words, [{}], 100, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("The statement")
