"""Commands as people type them: which are understood, and what is started of them."""

import re
import sys
from argparse import ArgumentTypeError

import pytest
from slow_link import Launcher
from slow_link.__main__ import delay, rate
from slow_link.launcher import find_mpiexec
from slow_link.programs import program

pytestmark = pytest.mark.quick


class Noted(Launcher):
    """Starts nothing; keeps what it was to start."""

    def prefix(self, rank):
        return [f"in{rank}"]

    def _run(self, commands, *args, **kwargs):
        self.commands = commands
        return [None] * len(commands)


def started(words, ranks=None):
    found = program(words.split(), ranks=ranks)
    link = Noted(ranks=found.ranks)
    found.run(link, timeout=1.0)
    return [" ".join(command) for command in link.commands]


@pytest.mark.mpi
@pytest.mark.mpich
def test_mpiexec_starts_a_section_for_each_rank():
    [words] = started("mpiexec -genv A 1 -n 2 -env B 2 python train.py --lr 0.1")
    path, _, sections = words.partition(" ")
    assert path.endswith("mpiexec")
    section = "-n 1 -env B 2 in{} python train.py --lr 0.1"
    assert sections == f"-genv A 1 {section.format(0)} : {section.format(1)}"


@pytest.mark.parametrize("start", ["torchrun", f"{sys.executable} -m torch.distributed.run"])
def test_torchrun_starts_a_node_for_each_rank(start):
    first, second = started(f"{start} --standalone --nnodes=1 --nproc_per_node=2 --max-restarts 0 -m train --lr 0.1")
    assert first.startswith(f"in0 {start} --max-restarts 0 -m --nproc-per-node=1 --nnodes=2 --master-addr=127.0.0.1")
    assert first.endswith("--node-rank=0 train --lr 0.1")
    assert second == first.replace("in0", "in1").replace("--node-rank=0", "--node-rank=1")


def test_anything_else_is_started_as_often_as_asked():
    assert started("python train.py", ranks=3) == ["in0 python train.py", "in1 python train.py", "in2 python train.py"]


@pytest.mark.parametrize(
    ("words", "ranks", "reason"),
    [
        ("python train.py", None, "--ranks P is missing: python is neither mpiexec nor torchrun"),
        ("mpiexec python train.py", None, "expected mpiexec -n P COMMAND"),
        ("mpiexec -n 2", None, "expected mpiexec -n P COMMAND"),
        ("mpiexec -n two python train.py", None, "expected -n P with P a whole number from 1, got -n two"),
        ("mpiexec -n 2 a : -n 2 b", None, "one command for all ranks"),
        ("mpiexec -n 2 -ppn 1 python train.py", None, "-ppn: options that can be passed on are -n"),
        ("mpiexec -n 2 python train.py", 4, "--ranks 4 was given, and mpiexec is asked for 2"),
        ("torchrun --nproc-per-node gpu train.py", None, "P a whole number from 1, got --nproc-per-node gpu"),
        ("torchrun --novel 3 train.py", None, "--novel: not known here"),
        ("torchrun --nnodes 2 --nproc-per-node 2 x.py", None, "torchrun --nnodes 2: every rank is a node of its own"),
        ("torchrun --rdzv_endpoint=host:1 x.py", None, "torchrun --rdzv_endpoint host:1: every rank is a node"),
        ("torchrun train.py", None, "expected torchrun --nproc-per-node P SCRIPT"),
    ],
)
@pytest.mark.mpi
@pytest.mark.mpich
def test_what_is_not_understood_is_refused(words, ranks, reason):
    with pytest.raises(ValueError, match=re.escape(reason)):
        program(words.split(), ranks=ranks)


def test_ranks_may_be_said_twice_if_they_agree():
    assert len(started("torchrun --nproc-per-node 2 x", ranks=2)) == 2


def test_rates_and_delays_are_read_with_their_units():
    rates = {"100mbit": 100, "1gbit": 1000, "1.5Gbit": 1500, "64 kbit": 0.064}
    assert {text: rate(text) for text in rates} == pytest.approx(rates)
    delays = {"1ms": 1, "50us": 0.05, ".2s": 200, "0ms": 0}
    assert {text: delay(text) for text in delays} == pytest.approx(delays)
    for wrong in ("100", "0mbit", "-1mbit", "1ms", "mbit", "100mbps"):
        with pytest.raises(ArgumentTypeError, match="expected a rate"):
            rate(wrong)
    with pytest.raises(ArgumentTypeError, match="expected a delay such as 1ms or 50us \\(units: us, ms, s\\), got '1'"):
        delay("1")


def test_another_mpis_launcher_is_refused(tmp_path, monkeypatch):
    fake = tmp_path / "mpiexec.other"
    fake.write_text("#!/bin/sh\necho 'mpiexec (Open MPI) 5.0.11'\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(ValueError, match=r"is Open MPI's, which is not kept on the link: MPICH's is"):
        find_mpiexec(fake.name)
    fake.write_text("#!/bin/sh\necho HYDRA build details:\n")
    assert find_mpiexec(fake.name) == str(fake)
