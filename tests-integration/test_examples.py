"""Every example is listed, and runs as it stands."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from traces import arrows, check_trace

EXAMPLES = Path(__file__).parent.parent / "examples"
HERE = Path(__file__).parent
ELSEWHERE = {
    "ddp_digits.py": "digits_cases.py",
    "eager_diloco.py": "test_eager_diloco.py",
    "gtopk_mpi.sh": "test_published_commands.py",
    "accelerate": "../tests-ecosystem/test_frameworks.py",
    "hsdp": "test_hsdp_example.py",
    "kubernetes": "test_clusters.py",
    "lightning": "../tests-ecosystem/test_frameworks.py",
    "ray": "../.github/workflows/check.yml",
    "ring-reduce-scatter": "test_third_party.py",
    "slurm": "../.github/workflows/check.yml",
    "transformers": "../tests-ecosystem/test_frameworks.py",
}
"""What another test runs."""


def output(launches):
    """What the ranks wrote, rank 0's first."""
    for done in launches:
        assert done.returncode == 0, done.stderr
    return "".join(done.stdout for done in launches)


def percent(text):
    return [float(number) for number in re.findall(r"([\d.]+)%", text)]


@pytest.mark.few(0)
def test_ddp_goes_on_after_a_stop_on_more_ranks_too(processes, tmp_path):
    script = EXAMPLES / "ddp_checkpoints.py"
    for size, epochs in ((2, "1 to 2"), (2, "3 to 4"), (3, "5 to 6")):
        said = output(processes(size, script, tmp_path))
        assert f"epochs {epochs} on {size} ranks" in said
    assert percent(said)[0] > 88


def test_ddp_in_mixed_precision(processes):
    said = output(processes(2, EXAMPLES / "ddp_amp.py"))
    assert "clip_norm=5.0" in said
    assert "100 steps, " in said
    assert float(re.search(r"\(([\d.]+)x fewer\)", said)[1]) > 20


def test_a_trace(processes, tmp_path):
    assert "fewer" in output(processes(3, EXAMPLES / "ddp_trace.py", tmp_path / "trace.json"))
    trace = json.loads((tmp_path / "trace.json").read_text())
    check_trace(trace)
    assert {"select", "exchange", "wait", "backward"} <= {event["name"] for event in trace["traceEvents"]}
    assert {sent["pid"] for sent, _ in arrows(trace)} == {0, 1, 2}


@pytest.mark.mpi
def test_mpi_and_numpy(mpiexec):
    done = mpiexec(2, EXAMPLES / "mpi_numpy.py")
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) < 0.1  # of differences up to 4


def test_calls_in_flight(processes):
    said = output(processes(2, EXAMPLES / "async_allreduce.py"))
    assert "is the fastest" in said
    assert "under way in the background" in said


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["diloco", "local", "overlap"])
def test_ranks_that_meet_seldom(processes, name):
    said = output(processes(2, EXAMPLES / "local_sgd_digits.py", name))
    assert said.startswith(f"{name} on 2 ranks")
    assert percent(said)[0] > 88


@pytest.mark.few(0)
def test_a_rank_is_killed_and_another_one_joins(forked, tmp_path):
    said = output(forked([EXAMPLES / "elastic_digits.py"], [{}], 280, tmp_path))
    assert re.search(r"3 ranks at the end, generation [2-9]", said)
    assert percent(said)[0] > 88
    assert "exit statuses [0, -9, 0, 0]" in said


@pytest.mark.parametrize(
    ("name", "lines", "least"),
    [("own_compressor.py", 9, 20), ("own_dense_compressor.py", 2, 80), ("sparse_vectors.py", 9, None)],
)
def test_in_one_process(forked, tmp_path, name, lines, least):
    said = output(forked([EXAMPLES / name], [{}], 280, tmp_path))
    assert len(said.splitlines()) == lines
    if least is not None:
        assert min(percent(said)) > least  # chance is 10


def test_all_are_listed_with_a_command_and_run_by_a_test():
    listed = (EXAMPLES / "README.md").read_text()
    own = Path(__file__).read_text()
    for path in sorted(EXAMPLES.iterdir()):
        if path.name in ("README.md", "__pycache__") or path.suffix == ".pyc":
            continue
        assert f"| [{path.name}]({path.name}) |" in listed, f"{path.name} is not in examples/README.md"
        test = (HERE / ELSEWHERE[path.name]).read_text() if path.name in ELSEWHERE else own
        assert path.name in test, f"no test runs {path.name}"
        if path.suffix == ".py":
            [start] = re.findall(rf"^\| \[{path.name}\].*\| `(.*)` \|$", listed, re.MULTILINE)
            assert f"\n{start}" in path.read_text().replace("    ", ""), (
                f"{path.name} says another command than examples/README.md"
            )
