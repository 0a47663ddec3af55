"""advise on real ranks: it measures the link that the ranks have, and only rank 0 speaks."""

from __future__ import annotations

import json
import os

import pytest

FLAGS = ["--parameters", "1e5", "--step-seconds", "0.1", "--density", "0.01", "--json"]
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
ONE_FAILS = """import os, torch
def rank():
    if "RANK" in os.environ:
        return int(os.environ["RANK"])
    from mpi4py import MPI
    return MPI.COMM_WORLD.rank
def at_once():
    if rank() == 1:
        raise ValueError("no data here")
    return model()
def model():
    linear, calls = torch.nn.Linear(9, 1), []
    def loss():
        calls.append(1)
        if rank() == 1 and len(calls) == 2:
            raise ValueError("no more data here")
        return linear(torch.ones(2, 9)).sum()
    return linear, loss
"""


@pytest.fixture
def factories(tmp_path, monkeypatch):
    """MODULE of a factory that fails on rank 1 at once, and of one whose loss does later; the path of its file."""
    path = tmp_path / "one_fails.py"
    path.write_text(ONE_FAILS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    return path


def check(out, ranks):
    found = json.loads(out)
    assert found["ranks"] == ranks
    assert found["link"]["name"] == "measured"
    assert found["link"]["beta"] > 0
    assert found["pairs"]["alpha"] > 0


@pytest.mark.few(0)
@pytest.mark.mpi
def test_under_mpiexec_where_one_rank_tells_what_is_measured(mpiexec):
    done = mpiexec(3, "-m", "thinwire", "advise", *FLAGS)
    assert done.returncode == 0, done.stderr
    check(done.stdout, 3)
    lines = [line for line in done.stderr.splitlines() if "thinwire advise: " in line]
    told = [line.partition("advise: ")[2] for line in lines]
    seldom = "measuring the optimizer around a selection"  # where the link, as it is now, makes one worth it
    assert [what for what in told if what != seldom] == [
        "measuring selecting and merging at density 0.01 (1 of 1)",
        "measuring the work of the other ways",
        "measuring the link between 3 ranks",
        "predicting steps of 3 ranks",
    ]


SAID = {
    "at_once": "rank 1: --model one_fails:at_once: at_once() raised ValueError: no data here ({path}, line 9)",
    "model": "rank 1: --model one_fails:model: loss() raised ValueError: no more data here ({path}, line 16)",
}


CALLS = """import sys
from thinwire.advice.command import main
for factory in sys.argv[1:]:
    print(main(["--model", f"one_fails:{factory}"]), flush=True)
"""


@pytest.mark.mpi
def test_a_factory_that_fails_on_one_rank_ends_all_under_mpiexec(mpiexec, factories, tmp_path):
    script = tmp_path / "calls.py"
    script.write_text(CALLS)
    done = mpiexec(2, script, *SAID)
    assert (done.returncode, done.stdout.split()) == (0, ["2"] * 4), done.stderr
    for said in SAID.values():
        assert done.stderr.count(said.format(path=factories)) == 1
    assert "Traceback" not in done.stderr


@pytest.mark.few(0)
def test_under_torchrun(processes):
    [done] = processes(1, *TORCHRUN, "-m", "thinwire", "advise", *FLAGS)
    assert done.returncode == 0, done.stderr
    check(done.stdout, 2)


@pytest.mark.few(0)
def test_a_factory_that_fails_on_one_rank_ends_all_under_torchrun(processes, factories):
    """torchrun itself adds a report that a worker has failed."""
    [done] = processes(1, *TORCHRUN, "-m", "thinwire", "advise", "--model", "one_fails:at_once")
    assert done.returncode != 0
    assert done.stderr.count(SAID["at_once"].format(path=factories)) == 1
    assert "advise/measuring.py" not in done.stderr
