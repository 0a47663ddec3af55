"""doctor on real ranks: they meet and exchange, or rank 0 says in time why not."""

from __future__ import annotations

import json
import os
import re
import socket
import time

import pytest
from thinwire.doctor.facts import PACKAGES, Launched
from thinwire.doctor.installation import about_kernels, about_mpi, about_packages, about_slow_link, about_torch
from thinwire.doctor.probe import Probe
from thinwire.doctor.ranks import about_ranks

from release.packages import ROOT, packages

DOCTOR = ["-m", "thinwire", "doctor", "--json"]
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
KERNELS = ["kernels for avx512: kernels.so", "NumPy: SPARSE_COMPRESS_NATIVE=0 is set"]
SLACK_SECONDS = 40
"""Beyond the time limit of ranks that do not meet: Python's start, and the probes of this machine, which are many."""


def node(number, interface, address):
    return {"host": f"node{number}", "interface": interface, "address": address, "versions": {"torch": "2.13.0"}}


def shown():
    """Findings for which the page has a line."""
    behind = [node(1, "e0", "10.77.0.1"), node(2, "e0", "10.77.0.2")]
    loopbacks = [node(1, "lo", "127.0.1.1"), node(2, "lo", "127.0.1.1")]
    by_torch, by_mpi = Launched("WORLD_SIZE", 0, 2), Launched("PMI_SIZE", 0, 2)
    kernels = [f"sparse-compress 0.1.0: on a CPU {words}" for words in KERNELS]
    mpi = Probe(0, "4.1.2\nMPICH Version:      5.0.2\nTHREAD_MULTIPLE\n", "", 30)
    yield from about_packages(dict.fromkeys(PACKAGES, "0.1.0"))
    yield from about_ranks(by_torch, {"ranks": behind, "pairs": True, "alpha": 1.46e-3, "beta": 8e-9 / 0.0951}, {})
    yield about_torch("2.13.0+cpu", ["gloo"], None, driver=False, triton=True)
    yield from (about_kernels(Probe(0, words, "", 30)) for words in kernels)
    yield from about_mpi(mpi, Probe(0, "HYDRA build details:", "", 30))
    yield from about_mpi(mpi, Probe(0, "mpiexec (Open MPI) 5.0.3", "", 30))
    yield about_slow_link(Probe(0, "", "", 30))
    yield from about_ranks(by_torch, {"ranks": loopbacks, "error": "not done within 30 s"}, {})
    yield from about_ranks(by_mpi, {"ranks": behind[:1], "library": "MPICH 5.0.2"}, {})
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    yield from about_ranks(by_torch, {"error": "EADDRINUSE, message: address already in use"}, place)


@pytest.mark.quick
def test_the_page_shows_what_the_command_prints():
    page = (ROOT / "docs" / "packages" / "thinwire.md").read_text()
    lines = re.findall(r"^(?:ok  |note|FAULT) .*", page, re.MULTILINE)
    assert len(lines) == 17
    assert set(lines) <= set(map(str, shown()))


def findings_of(done):
    """Findings on stdout, which holds nothing else; the exit status is theirs."""
    findings = json.loads(done.stdout)
    assert (done.returncode != 0) == any(finding["level"] == "fault" for finding in findings)
    return findings


def that_says(word, findings):
    [found] = [finding for finding in findings if word in finding["what"]]
    return found


def check(done, takes):
    findings = findings_of(done)
    host = f"ranks 0-1 on {socket.gethostname()}, {takes} "
    for word in (host, "all 2 ranks have the same", "every pair of ranks exchanges", "link of the slowest pair: "):
        assert that_says(word, findings)["level"] == "ok"
    assert "not done within" not in done.stdout


@pytest.mark.quick
def test_every_package_of_the_tree_is_asked_for():
    assert set(PACKAGES) == {name for name, package in packages().items() if package.folder.parent.name == "packages"}


@pytest.mark.few(0)
def test_under_torchrun(processes):
    [done] = processes(1, *TORCHRUN, *DOCTOR, "--timeout", "80")
    check(done, "gloo takes")


@pytest.mark.few(0)
@pytest.mark.mpi
def test_under_mpiexec(mpiexec):
    check(mpiexec(2, *DOCTOR, "--timeout", "80"), "gloo would take")


@pytest.mark.few(0)
@pytest.mark.mpi
def test_a_launcher_of_another_mpi_than_mpi4pys(forked):
    """Without the descriptor or address of a launcher, each process is one rank: so it is with another MPI's."""
    [done] = forked(DOCTOR, [{"PMI_RANK": "0", "PMI_SIZE": "2"}], 100, os.getcwd())
    found = that_says("2 ranks were started (PMI_SIZE), but mpi4py, with ", findings_of(done))
    assert found["level"] == "fault"
    assert found["what"].endswith(", finds 1")


@pytest.mark.few(0)
def test_a_port_that_another_program_has(forked):
    """Rank 0 cannot listen there; who connects to a program that is silent is ended by the time limit alone."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1]), "WORLD_SIZE": "2"}
        begin = time.monotonic()
        ranks = [{**place, "RANK": str(rank)} for rank in range(2)]
        first, second = forked([*DOCTOR, "--timeout", "20"], ranks, 100, os.getcwd())
        assert time.monotonic() - begin < 20 + SLACK_SECONDS
    found = that_says(f"MASTER_PORT at 127.0.0.1:{place['MASTER_PORT']} is taken", findings_of(first))
    assert found["level"] == "fault"
    assert (second.returncode, second.stdout) == (1, "")
    assert "rank 1: FAULT 2 ranks were started (WORLD_SIZE), and rank 1 does not meet them (not done " in second.stderr


def test_a_rank_that_does_not_come(forked, free_port):
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "RANK": "0"}
    begin = time.monotonic()
    [done] = forked([*DOCTOR, "--timeout", "20"], [place], 100, os.getcwd())
    assert time.monotonic() - begin < 20 + SLACK_SECONDS
    found = that_says("2 ranks were started (WORLD_SIZE), and rank 0 does not meet them", findings_of(done))
    assert found["level"] == "fault"
    assert found["remedy"].startswith(f"likely 127.0.0.1:{place['MASTER_PORT']}")


@pytest.mark.few(0)
def test_an_interface_that_one_rank_does_not_have(forked, free_port):
    """They meet in the Store, by which rank 0 knows what the other one took; gloo then fails on it."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    ranks = [{**place, "RANK": "0"}, {**place, "RANK": "1", "GLOO_SOCKET_IFNAME": "none0"}]
    first, second = forked([*DOCTOR, "--timeout", "20"], ranks, 100, os.getcwd())
    findings = findings_of(first)
    assert that_says("has no interface none0", findings)["level"] == "fault"
    assert (second.returncode, second.stdout) == (0, "")
