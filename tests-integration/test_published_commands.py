"""Commands as they were published, with this program in the place of theirs, for one short epoch on small files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import small_files

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.mpi

SPARDL = """mpiexec -n 2 -host node0,node1 python main_trainer.py --dnn vgg16 --dataset cifar10 --max-epochs 121
    --batch-size 16 --nworkers 2 --data-dir vgg_data --lr 0.1 --compression --density 0.01 --compressor spardl"""
GTOPK = "dnn=resnet20 nworkers=4 ./gtopk_mpi.sh"
SHORT = "--max-epochs 1 --checkpoint-every 0 --output run"  # what is given twice is taken as it was given last


def rows_of(command: str, folder: Path) -> list[dict[str, object]]:
    """The metrics of a run that this command, in a shell in this folder, has made."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "MPIEXEC_TIMEOUT": "200"}
    done = subprocess.run(["sh", "-c", command], cwd=folder, env=env, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("cifar: warning:") == 1  # from one rank; the files are small
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    shutil.rmtree(folder / "run")
    return rows


@pytest.mark.few(0)
def test_spardl(tmp_path: Path) -> None:
    small_files.cifar10_python(tmp_path / "vgg_data")  # as torchvision unpacks it
    ours = " ".join(SPARDL.split()).replace("main_trainer.py", "-m cifar").replace("node0,node1", "localhost,localhost")
    [row] = rows_of(f"{ours} {SHORT}", tmp_path)
    assert (row["algorithm"], row["world_size"], row["steps"]) == ("spardl", 2, 1)
    dense = 2 * 4 * 14_728_266 / 2  # bytes of a ring at P = 2
    assert 0 < row["bytes_sent"] < 0.03 * dense


@pytest.mark.few(0)
def test_gtopk(tmp_path: Path) -> None:
    small_files.cifar10_binary(tmp_path / "data")
    shutil.copy(ROOT / "examples" / "gtopk_mpi.sh", tmp_path)
    [row] = rows_of(f"{GTOPK} {SHORT}", tmp_path)
    assert (row["algorithm"], row["world_size"], row["steps"]) == ("gtopk", 4, 1)
    assert row["bytes_sent"] < 20 * 269_722 * 0.001 * 2  # ⌈log P⌉ rounds of 8k bytes, and headers


@pytest.mark.parametrize("variables", ["dnn=alexnet", "dnn=vgg16 compressor=none lr=0.5", "hosts=a,b density=0.5"])
def test_the_variables_of_the_script(variables: str, tmp_path: Path) -> None:
    """What it starts, without starting it."""
    (tmp_path / "mpiexec").write_text('#!/bin/sh\nprintf "%s " "$@"\n')
    (tmp_path / "mpiexec").chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = f"{variables} {ROOT / 'examples' / 'gtopk_mpi.sh'} --seed 3"
    shown = subprocess.run(["sh", "-c", command], env=env, capture_output=True, text=True, check=True).stdout
    says = {
        "dnn=alexnet": "--dnn alexnet --dataset imagenet --max-epochs 95 --batch-size 256",
        "dnn=vgg16 compressor=none lr=0.5": "--lr 0.5 --compression --compressor none --seed 3",
        "hosts=a,b density=0.5": "-n 4 -host a,b python -m cifar --dnn resnet20",
    }
    assert says[variables] in shown
    assert ("--density" in shown) == ("none" not in variables)
