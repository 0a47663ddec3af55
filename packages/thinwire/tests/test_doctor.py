"""thinwire doctor without a cluster: what it finds in what a machine, a launcher and other ranks may say."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError

import pytest
import torch
import torch.distributed as dist
from communicators import Payload, SimulatedWorld, run
from thinwire.__main__ import main as thinwire
from thinwire.doctor import command, meeting
from thinwire.doctor.facts import PACKAGES, Launched, gloo_listens, interfaces, launched, own_addresses, versions
from thinwire.doctor.installation import about_kernels, about_mpi, about_packages, about_slow_link, about_torch
from thinwire.doctor.meeting import by_torch, to_everybody
from thinwire.doctor.probe import FAULT, NOTE, OK, Finding, Probe, probe
from thinwire.doctor.ranks import LATE, about_one_rank, about_ranks, numbers, outcome

pytestmark = pytest.mark.quick

TOO_LONG = Probe(None, "", "Traceback, cut off", 30.0)


def said(out, err="", status=0):
    return Probe(status, out, err, 30.0)


def levels(findings):
    return [finding.level for finding in findings]


def the(findings, level):
    """The one finding of a level."""
    [found] = [finding for finding in findings if finding.level == level]
    return found


def test_every_distribution_is_asked_for():
    assert versions(lambda name: f"of {name}") == {name: f"of {name}" for name in PACKAGES}
    assert len(PACKAGES) == 9


def test_a_distribution_that_is_not_installed_is_a_note():
    def get(name):
        if name == "slow-link":
            raise PackageNotFoundError(name)
        return "1.0" if name == "thinwire" else "2.0"

    findings = about_packages(versions(get))
    assert levels(findings) == [OK, OK, NOTE]
    assert "slow-link" not in findings[0].what + findings[1].what
    assert findings[0].what.endswith("partial-collectives 2.0")
    assert findings[1].what == "thinwire 1.0"
    assert findings[2].what == "not installed: slow-link"
    assert findings[2].remedy


GLOO = ["gloo", "NCCL"]
H100 = said("NVIDIA H100\nNVIDIA H100\n")


@pytest.mark.parametrize(
    ("version", "backends", "cuda", "driver", "triton", "level", "words"),
    [
        ("2.6.0", GLOO, None, False, False, OK, "torch 2.6.0, gloo, NCCL, no CUDA device"),
        ("2.13.0+cpu", ["gloo"], None, False, True, OK, "torch 2.13.0+cpu, gloo, no CUDA device"),
        ("2.13.0", GLOO, H100, True, True, OK, "torch 2.13.0, gloo, NCCL, NVIDIA H100, NVIDIA H100"),
        ("2.13.0", GLOO, said(""), False, True, OK, "no CUDA device"),
        ("2.5.1", GLOO, None, False, True, FAULT, "too old: pip install 'torch>=2.6'"),
        ("2.13.0", [], None, False, True, FAULT, "no gloo"),
        ("2.13.0", ["NCCL"], None, False, True, FAULT, "no gloo"),
        ("2.13.0", GLOO, said("", "Error: no kernel image\n", 1), True, True, FAULT, "CUDA fails (Error: no kernel"),
        ("2.13.0", GLOO, TOO_LONG, True, True, FAULT, "CUDA fails (not done within 30 s)"),
        ("2.13.0", GLOO, None, True, True, NOTE, "though there is a GPU's driver: install a build of torch with CUDA"),
        ("2.13.0", GLOO, said(""), True, True, NOTE, "CUDA_VISIBLE_DEVICES"),
        ("2.13.0", GLOO, H100, True, False, NOTE, "no Triton, so selection on a GPU is slower: pip install triton"),
    ],
)
def test_torch(version, backends, cuda, driver, triton, level, words):
    found = about_torch(version, backends, cuda, driver=driver, triton=triton)
    assert found.level == level
    assert words in str(found)


KERNELS = "sparse-compress 0.1: on a CPU "


@pytest.mark.parametrize(
    ("tried", "level", "words"),
    [
        (said(KERNELS + "kernels for avx2: kernels.so\n"), OK, "compiled kernels for avx2"),
        (said(KERNELS + "NumPy: installed without a compiled file\n"), NOTE, "slower (NumPy: installed without"),
        (said(KERNELS + "NumPy: installed without a compiled file\n"), NOTE, "install a C compiler"),
        (said(KERNELS + "NumPy: SPARSE_COMPRESS_NATIVE=0 is set\n"), NOTE, "unset SPARSE_COMPRESS_NATIVE"),
        (said("", status=-4), FAULT, "exit status -4, without a word"),
        (said("", "ImportError: no numpy\n", 1), FAULT, "fails (ImportError: no numpy)"),
        (said("something else\n"), FAULT, "sparse-compress fails"),
        (TOO_LONG, FAULT, "(not done within 30 s): give a busy machine longer by --timeout; if it hangs, set"),
        (
            said(KERNELS + "NumPy: kernels.so cannot be loaded: too short\n"),
            NOTE,
            "too short): install sparse-compress",
        ),
        (TOO_LONG._replace(out=KERNELS + "kernels for avx2: kernels.so\n"), FAULT, "not done within 30 s"),
    ],
)
def test_kernels(tried, level, words):
    found = about_kernels(tried)
    assert found.level == level
    assert words in str(found)


def test_the_remedy_for_kernels_is_one():
    assert "C compiler" not in about_kernels(said(KERNELS + "NumPy: SPARSE_COMPRESS_NATIVE=0 is set\n")).remedy


MPICH = said("4.1.2\nMPICH Version:      5.0.2\nTHREAD_MULTIPLE\n")
OPEN_MPI = said("4.1.2\nOpen MPI v5.0.3, package: Open MPI, ident: 5.0.3\nTHREAD_MULTIPLE\n")
INTEL = said("4.1.2\nIntel(R) MPI Library 2021.9 for Linux* OS\nTHREAD_MULTIPLE\n")
OTHER = said("4.1.2\nSome MPI 7\nTHREAD_MULTIPLE\n")
HYDRA = said("HYDRA build details:\n    Version:  5.0.2\n")
INTEL_HYDRA = said("Intel(R) MPI Library for Linux* OS, Version 2021.9 Build 20230307\n")
PRRTE, ORTE = said("mpiexec (Open MPI) 5.0.3\n"), said("mpiexec (OpenRTE) 4.1.1\n")
NO_MPI4PY = said("", "Traceback ...\nModuleNotFoundError: No module named 'mpi4py'\n", 1)
NO_LIBRARY = said("", "RuntimeError: cannot load MPI library\nlibmpi.so: cannot open shared object file\n", 1)


@pytest.mark.parametrize(
    ("tried", "mpiexec", "expected", "words"),
    [
        (MPICH, HYDRA, [OK, OK], "mpi4py 4.1.2, MPICH 5.0.2, THREAD_MULTIPLE"),
        (MPICH, HYDRA, [OK, OK], "mpiexec is MPICH's"),
        (MPICH, INTEL_HYDRA, [OK, OK], "mpiexec is MPICH's"),
        (INTEL, HYDRA, [OK, OK], "Intel(R) MPI Library 2021.9"),
        (OPEN_MPI, PRRTE, [OK, OK], "mpi4py 4.1.2, Open MPI v5.0.3, THREAD_MULTIPLE"),
        (OPEN_MPI, ORTE, [OK, OK], "mpiexec is Open MPI's"),
        (MPICH, PRRTE, [OK, FAULT], "mpiexec is Open MPI's, mpi4py loads MPICH 5.0.2: every process would be rank 0"),
        (MPICH, ORTE, [OK, FAULT], "put MPICH's mpiexec first on the PATH, or install mpi4py for Open MPI"),
        (OPEN_MPI, HYDRA, [OK, FAULT], "mpiexec is MPICH's, mpi4py loads Open MPI v5.0.3"),
        (MPICH, None, [OK, NOTE], "no mpiexec on the PATH"),
        (MPICH, said("no options", status=1), [OK, NOTE], "try whether they fit"),
        (OTHER, HYDRA, [OK, OK], "mpiexec is MPICH's"),
        (said("4\nMPICH 3\nTHREAD_SERIALIZED\n"), HYDRA, [NOTE, OK], "inside calls only"),
        (NO_MPI4PY, HYDRA, [NOTE], "no mpi4py: pip install mpi4py mpich"),
        (NO_MPI4PY, None, [NOTE], "no mpi4py"),
        (NO_LIBRARY, HYDRA, [FAULT], "mpi4py, cannot start MPI (libmpi.so: cannot open shared object file)"),
        (MPICH._replace(status=-6, err="Abort: no PMI\n---\n"), HYDRA, [FAULT], "cannot start MPI (Abort: no PMI)"),
        (TOO_LONG._replace(out="4\nMPICH 3\n"), HYDRA, [FAULT], "mpi4py 4, MPICH 3, cannot start MPI (not done within"),
    ],
)
def test_mpi(tried, mpiexec, expected, words):
    findings = about_mpi(tried, mpiexec)
    assert levels(findings) == expected
    assert words in "\n".join(map(str, findings))


@pytest.mark.parametrize(
    ("tried", "level", "words"),
    [
        (said("\n"), OK, "slow links can be emulated"),
        (said("no `tc` on the PATH\n"), NOTE, "(no `tc` on the PATH)"),
        (TOO_LONG, NOTE, "(not done within 30 s)"),
        (said("", "unshare: not allowed\n", 1), NOTE, "(unshare: not allowed)"),
    ],
)
def test_slow_link(tried, level, words):
    found = about_slow_link(tried)
    assert found.level == level
    assert words in str(found)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"RANK": "1", "WORLD_SIZE": "4"}, Launched("WORLD_SIZE", 1, 4)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, None),
        ({"WORLD_SIZE": "4"}, None),
        ({"RANK": "", "WORLD_SIZE": "4", "PMI_RANK": "2", "PMI_SIZE": "3"}, Launched("PMI_SIZE", 2, 3)),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, Launched("OMPI_COMM_WORLD_SIZE", 0, 2)),
        ({"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8"}, Launched("SLURM_STEP_NUM_TASKS", 3, 8)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, None),  # a batch script
        # torchrun under srun, once a node
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "RANK": "5", "WORLD_SIZE": "8"}, ("WORLD_SIZE", 5, 8)),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "RANK": "0", "WORLD_SIZE": "1"}, None),
    ],
)
def test_launched(environ, expected):
    assert launched(environ) == expected


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE"])
def test_a_variable_of_a_launch_that_is_no_number(name):
    assert about_one_rank({}).level == about_one_rank({"WORLD_SIZE": "2"}).level == NOTE
    found = about_one_rank({"RANK": "0", "WORLD_SIZE": "2", name: "x"})
    assert (found.level, found.what) == (FAULT, f"{name} is 'x', expected a number")


@pytest.mark.parametrize(
    ("environ", "addresses", "expected"),
    [
        ({}, ["10.0.0.1", "127.0.0.1"], ("eth0", "10.0.0.1")),
        ({}, ["127.0.0.1"], ("lo", "127.0.0.1")),
        ({}, ["127.0.1.1"], ("lo", "127.0.1.1")),
        ({}, [], ("lo", "127.0.0.1")),
        ({}, ["fd00::2"], ("?", "fd00::2")),
        ({"GLOO_SOCKET_IFNAME": ""}, ["10.0.0.1"], ("eth0", "10.0.0.1")),
        ({"GLOO_SOCKET_IFNAME": "ib0"}, ["10.0.0.1"], ("ib0", "192.168.0.1")),
        ({"GLOO_SOCKET_IFNAME": "ib0,eth0"}, ["10.0.0.1"], ("ib0", "192.168.0.1")),
        ({"GLOO_SOCKET_IFNAME": "tun0"}, ["10.0.0.1"], ("tun0", "")),
        ({"GLOO_SOCKET_IFNAME": "eth9"}, ["10.0.0.1"], ("eth9", None)),
    ],
)
def test_where_gloo_listens(environ, addresses, expected):
    its = {"lo": "127.0.0.1", "eth0": "10.0.0.1", "ib0": "192.168.0.1", "tun0": ""}
    assert gloo_listens(environ, its, addresses) == expected


def test_addresses_are_those_that_this_machine_has(monkeypatch):
    def resolved(*names, **kinds):
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (its, 0)) for its in ("203.0.113.7", "127.0.0.1")]

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    assert own_addresses() == ["127.0.0.1"]
    assert "127.0.0.1" in interfaces().values()


def test_a_host_name_that_nobody_knows_has_no_address(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    assert own_addresses() == []


def rank(host="node1", address="10.0.0.1", interface="eth0", **its):
    return {"host": host, "interface": interface, "address": address, "versions": {"torch": "2.13.0", **its}}


BY_TORCH, BY_MPI = Launched("WORLD_SIZE", 0, 2), Launched("PMI_SIZE", 0, 2)
TWO = [rank(), rank("node2", "10.0.0.2")]
LINK = {"pairs": True, "alpha": 50e-6, "beta": 8e-9}
PLACE = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize("here", [BY_TORCH, BY_MPI])
def test_ranks_that_meet(here):
    findings = about_ranks(here, {"ranks": TWO, **LINK}, PLACE)
    assert levels(findings) == [OK] * 5
    takes = "gloo takes" if here is BY_TORCH else "gloo would take"
    assert findings[0].what == f"rank 0 on node1, {takes} eth0 10.0.0.1"
    assert findings[1].what == f"rank 1 on node2, {takes} eth0 10.0.0.2"
    assert findings[2].what == "all 2 ranks have the same torch and packages"
    assert findings[4].what == "link of the slowest pair: 50 µs a message, 1 Gbit/s"


def test_ranks_of_one_host_are_one_finding():
    met = {"ranks": [*TWO, *TWO[:1], *TWO[:1]], **LINK}
    findings = about_ranks(BY_TORCH._replace(size=4), met, PLACE)
    assert findings[0].what.startswith("ranks 0, 2-3 on node1")


def test_numbers_of_ranks():
    assert numbers([4]) == "rank 4"
    assert numbers([0, 1]) == "ranks 0-1"
    assert numbers([0, 1, 2, 5, 7, 8]) == "ranks 0-2, 5, 7-8"


LOOPBACKS = [rank(address="127.0.1.1", interface="lo"), rank("node2", "127.0.1.1", "lo")]


def test_a_name_that_stands_for_loopback_on_several_hosts_is_a_fault():
    findings = about_ranks(BY_TORCH, {"ranks": LOOPBACKS, "error": "Connection refused"}, PLACE)
    faults = [str(finding) for finding in findings if finding.level == FAULT]
    assert len(faults) == 2
    assert faults[0].startswith(
        "FAULT rank 0 on node1: its name stands for 127.0.1.1, which other hosts cannot reach: "
    )
    assert "GLOO_SOCKET_IFNAME" in faults[0]
    assert "GLOO_SOCKET_IFNAME" in faults[1]


def test_loopback_on_one_host_is_none_nor_is_it_where_mpi_carries():
    same_host = [LOOPBACKS[0], LOOPBACKS[0]]
    assert FAULT not in levels(about_ranks(BY_TORCH, {"ranks": same_host, **LINK}, PLACE))
    assert FAULT not in levels(about_ranks(BY_MPI, {"ranks": LOOPBACKS, **LINK}, PLACE))


def test_an_interface_that_is_not_there_is_a_fault():
    ranks = [rank(), rank("node2", None, "eth9")]
    findings = about_ranks(BY_TORCH, {"ranks": ranks, "error": "Unable to find address"}, PLACE)
    assert "rank 1 on node2 has no interface eth9: name another one in GLOO_SOCKET_IFNAME" in str(findings[1])
    assert levels(findings) == [OK, FAULT, OK]


def test_ranks_with_unlike_versions_are_told():
    ranks = [rank(thinwire="1.0"), rank("node2", thinwire="1.1"), rank(thinwire="1.0")]
    found = the(about_ranks(BY_TORCH._replace(size=3), {"ranks": ranks, **LINK}, PLACE), FAULT)
    assert found.what == "ranks have unlike versions of thinwire, 1.0 on ranks 0, 2, 1.1 on rank 1"
    ranks = [rank(thinwire="1.0"), rank("node2", thinwire="")]
    assert "none on rank 1" in the(about_ranks(BY_MPI, {"ranks": ranks, **LINK}, PLACE), FAULT).what


@pytest.mark.parametrize(
    ("here", "remedy"), [(BY_TORCH, "joins them: GLOO_SOCKET_IFNAME"), (BY_MPI, "joins them: FI_TCP_IFACE (MPICH)")]
)
def test_ranks_that_met_and_cannot_exchange(here, remedy):
    found = the(about_ranks(here, {"ranks": TWO, "error": "Connection refused"}, PLACE), FAULT)
    assert found.what == "ranks met, but cannot all exchange (Connection refused)"
    assert remedy in found.remedy


def test_ranks_of_two_jobs():
    error = "CollectiveError: rank 0 is of the job A=1, rank 1 of A=2: two jobs have met at one MASTER_ADDR"
    found = the(about_ranks(BY_TORCH, {"ranks": TWO, "error": error}, PLACE), FAULT)
    assert str(found).endswith("two jobs have met at one MASTER_ADDR): give each a MASTER_PORT of its own")


def test_a_link_that_takes_longer_than_the_limit():
    findings = about_ranks(BY_TORCH, {"ranks": TWO, "pairs": True, "error": TOO_LONG.why}, PLACE)
    assert OK in levels(findings)
    assert "(not done within 30 s): give a slow network more time by --timeout" in str(the(findings, FAULT))


def test_ranks_that_mpi4py_does_not_find_are_another_mpis():
    [found] = about_ranks(BY_MPI, {"ranks": TWO[:1], "library": "Open MPI v5.0.3"}, {})
    assert found.level == FAULT
    assert found.what == "2 ranks were started (PMI_SIZE), but mpi4py, with Open MPI v5.0.3, finds 1"
    assert "mpiexec" in found.remedy


TAKEN = "DistNetworkError: failed to listen. code: -98, name: EADDRINUSE, message: address already in use"
TAKEN_WITHOUT_LIBUV = "DistNetworkError: failed to bind to [::]:29500 (errno: 98 - Address already in use)."
IS_TAKEN = "MASTER_PORT at node1:29500 is taken by another program: take another MASTER_PORT"
PMIX = "check_MPIR_CVAR_PMI_VERSION(167):  Runtime environment uses unsupported PMI version PMIx. Aborting."
ABSENT = "DistStoreError: Timed out after 24 seconds waiting for clients. 1/2 clients joined."


@pytest.mark.parametrize(
    ("here", "error", "words"),
    [
        (BY_TORCH, TAKEN, [IS_TAKEN]),
        (BY_TORCH, TAKEN_WITHOUT_LIBUV, [IS_TAKEN]),
        (BY_TORCH, "DistNetworkError: Ping failed, invalid value", ["at node1:29500 answers what is not torch's"]),
        (BY_TORCH, ABSENT, [f"rank 0 does not meet them ({ABSENT}): likely node1:29500", "firewall", "interface"]),
        (BY_TORCH, TOO_LONG.why, ["(not done within 30 s)", "MASTER_ADDR", "another program's"]),
        (BY_TORCH, f"TimeoutError: {LATE}", ["had started): give it longer by --timeout"]),
        (BY_MPI, "ModuleNotFoundError: No module named 'mpi4py'", ["pip install mpi4py"]),
        (BY_MPI, PMIX, ["by a launcher of another MPI than mpi4py's", "start them by that MPI's own mpiexec"]),
        (BY_MPI, TOO_LONG.why, ["(not done within 30 s): likely an mpiexec of another MPI, a firewall"]),
    ],
)
def test_ranks_that_do_not_meet(here, error, words):
    [found] = about_ranks(here, {"error": error}, PLACE)
    assert found.level == FAULT
    assert [word for word in words if word not in str(found)] == []


@pytest.mark.parametrize(
    ("here", "place", "words"),
    [
        (
            BY_TORCH,
            {"MASTER_PORT": "29500"},
            "rank 0 of 2 meets none: MASTER_ADDR is not set, expected the host of rank 0",
        ),
        (BY_TORCH, {"MASTER_ADDR": "node1"}, "MASTER_PORT is '', expected one port of 1 to 65535 on all ranks"),
        (BY_TORCH, {**PLACE, "MASTER_PORT": "http"}, "MASTER_PORT is 'http', expected one port of 1 to 65535"),
        (BY_TORCH._replace(rank=3), PLACE, "RANK is 3, expected 0 to 1"),
    ],
)
def test_a_variable_that_is_wrong_is_no_matter_of_firewalls(here, place, words):
    [found] = about_ranks(here, {"error": TOO_LONG.why}, place)
    assert (found.level, found.remedy) == (FAULT, "start ranks by torchrun, or set it")
    assert words in found.what


def test_who_comes_when_time_is_over_does_not_blame_the_network():
    with pytest.raises(TimeoutError, match=LATE):
        by_torch({}, lambda: -1.5, print)


def test_an_outcome_is_what_was_said_until_a_process_ended():
    lines = 'MPI warns\n5\n{"ranks": [1, 2]}\n{"pairs": true}\n'
    assert outcome(said(lines)) == {"ranks": [1, 2], "pairs": True}
    assert outcome(TOO_LONG._replace(out=lines))["error"] == "not done within 30 s"
    own = outcome(said(lines + '{"error": "its own"}\n', "a word of torch's\n", 1))
    assert own == {"ranks": [1, 2], "pairs": True, "error": "its own"}


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_everybody_hears_from_everybody(size):
    SimulatedWorld(size).run(lambda comm: run(to_everybody(comm.rank, comm.size), comm))
    for rank in range(size):
        asked = next(to_everybody(rank, size))
        assert set(asked.sends) == set(asked.recvs) == set(range(size)) - {rank}


def test_a_pair_that_receives_something_else_is_told():
    schedule = to_everybody(0, 3)
    next(schedule)
    with pytest.raises(RuntimeError, match=r"from ranks \[2\]"):
        schedule.send({1: Payload.of(torch.tensor([1])), 2: Payload.of(torch.tensor([1]))})


def test_a_meeting_that_fails_ends_at_once(monkeypatch, capsys):
    def fails(*given):
        raise ValueError("one line\nframe #0")

    ended = []
    monkeypatch.setattr(meeting, "meet", fails)
    monkeypatch.setattr(os, "_exit", ended.append)
    meeting.main(0.0)
    assert ended == [1]
    assert json.loads(capsys.readouterr().out) == {"error": "ValueError: one line"}


def test_ranks_that_do_not_come_to_the_store_of_torchrun_are_named(monkeypatch):
    monkeypatch.setattr(meeting, "rendezvous", lambda *given, **limit: iter([(dist.HashStore(), 1, 4)]))
    left = iter([1.0, 1.0, -1.0])
    with pytest.raises(TimeoutError, match=r"rank 1 met no ranks \[0, 2, 3\]"):
        by_torch({}, lambda: next(left), print)


def test_ranks_that_come_to_the_store_tell_their_facts_in_order_before_gloo_may_fail(monkeypatch):
    store, told, begun = dist.HashStore(), [], []
    for rank in (0, 2):
        store.set(f"doctor/{rank}", json.dumps({"host": f"node{rank}"}))
    monkeypatch.setattr(meeting, "rendezvous", lambda *given, **limit: iter([(store, 1, 3)]))
    monkeypatch.setattr(dist, "init_process_group", lambda *given, **how: begun.append((list(told), how["rank"])))
    meeting.by_torch({"host": "node1"}, lambda: 9.0, lambda **found: told.append(found))
    ranks = {"ranks": [{"host": f"node{rank}"} for rank in range(3)]}
    assert (told, begun) == ([ranks], [([ranks], 1)])


HANGS = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(9)']); "


@pytest.mark.slow
def test_a_probe_ends_what_hangs_and_does_not_wait_for_what_that_started():
    begin = time.monotonic()
    found = probe([sys.executable, "-c", HANGS + "print(1, flush=True); time.sleep(30)"], {}, 1.0)
    assert time.monotonic() - begin < 8
    assert found.status is None
    assert found.why == "not done within 1 s"


def test_a_probe_outlives_what_aborts():
    code = "import os, sys; print('begun', os.environ['WORD'], flush=True); print('why', file=sys.stderr, flush=True)"
    found = probe([sys.executable, "-c", code + "; os.abort()"], {"WORD": "given"}, 60.0)
    assert (found.status, found.out, found.why) == (-6, "begun given\n", "why")


@pytest.fixture
def tried(monkeypatch):
    """(command, environment) of each probe; all of them end with nothing said."""
    calls = []

    def recorded(words, environ, seconds):
        calls.append((list(words), dict(environ)))
        return Probe(None, "", "", seconds)

    monkeypatch.setattr(command, "probe", recorded)
    return calls


LAUNCH = {"PMI_RANK": "0", "PMI_SIZE": "2", "PMI_FD": "9", "OMPI_COMM_WORLD_SIZE": "2", "SLURM_PROCID": "0"}


def test_probes_of_the_machine_know_of_no_launch_and_that_of_ranks_does(tried):
    findings = list(command.examined(Launched("PMI_SIZE", 0, 2), {"PATH": "", "KEPT": "1", **LAUNCH}, 5.0))
    [(words, environ)] = [call for call in tried if "thinwire.doctor.meeting" in call[0]]
    assert environ.items() >= LAUNCH.items()
    assert 3 < float(words[-1]) - time.monotonic() <= 4  # of 5 s, in the last of which it says whom it has missed
    others = [environ for words, environ in tried if "thinwire.doctor.meeting" not in words]
    assert len(others) >= 3
    assert all(environ == {"PATH": "", "KEPT": "1"} for environ in others)
    assert sum("not done within 5 s" in finding.what for finding in findings) >= 4


@pytest.mark.parametrize("triton", [None, "there"])
def test_of_a_gpu_it_is_told_whether_triton_is_missing(monkeypatch, triton):
    def answers(words, environ, seconds):
        return said("H100\n") if words == (sys.executable, "-c", command.CUDA) else TOO_LONG

    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(command, "find_spec", {"triton": triton}.get)
    monkeypatch.setattr(command, "probe", answers)
    [found] = [finding for finding in command.installed({"PATH": ""}, 5.0) if "torch" in finding.what]
    assert ("H100" in found.what, "no Triton" in found.what) == (True, triton is None)


def test_one_rank_is_told_that_no_network_was_tried(tried):
    findings = list(command.examined(None, {"PATH": ""}, 5.0))
    assert findings[-1].level == NOTE
    assert "no network was tried: torchrun" in str(findings[-1])
    assert not [words for words, _ in tried if "thinwire.doctor.meeting" in words]


def finds(monkeypatch, *findings):
    for name in LAUNCH | {"RANK": "", "WORLD_SIZE": ""}:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(command, "examined", lambda *given: iter(findings))


FINE, SLOWER, WRONG = Finding(OK, "fine"), Finding(NOTE, "slower", "do"), Finding(FAULT, "wrong", "mend µ")


def test_status_and_text(monkeypatch, capsys):
    finds(monkeypatch, FINE, SLOWER)
    assert thinwire(["doctor"]) == 0
    assert capsys.readouterr().out == "ok    fine\nnote  slower: do\n"
    finds(monkeypatch, FINE, WRONG)
    assert thinwire(["doctor"]) == 1
    assert capsys.readouterr().out == "ok    fine\nFAULT wrong: mend µ\n"


def test_json(monkeypatch, capsys):
    finds(monkeypatch, FINE, WRONG)
    assert thinwire(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == [
        {"level": "ok", "what": "fine", "remedy": ""},
        {"level": "fault", "what": "wrong", "remedy": "mend µ"},
    ]


@pytest.mark.slow
@pytest.mark.parametrize("flags", [["--timeout", "0"], ["--timeout", "soon"], ["--jsn"], ["more"]])
def test_wrong_flags(flags, capsys):
    with pytest.raises(SystemExit) as ended:
        thinwire(["doctor", *flags])
    assert ended.value.code == 2
    assert "usage: thinwire doctor" in capsys.readouterr().err


@pytest.fixture
def rank_three(monkeypatch):
    """Sleeps of the command on rank 3 of 4, whose meeting has the outcome that is set as `.met`."""
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", **PLACE}.items():
        monkeypatch.setenv(name, value)
    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)
    return slept


def test_another_rank_is_silent_where_rank_0_knows(monkeypatch, capsys, rank_three):
    monkeypatch.setattr(command, "meet", lambda *given: {"ranks": TWO, "error": "Connection refused"})
    assert thinwire(["doctor"]) == 0
    assert capsys.readouterr() == ("", "")
    assert not rank_three


def test_a_rank_that_met_nobody_says_so_and_leaves_rank_0_time_to_speak(monkeypatch, capsys, rank_three):
    monkeypatch.setattr(command, "meet", lambda *given: {"error": ABSENT})
    assert thinwire(["doctor", "--timeout", "8"]) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("rank 3: FAULT 4 ranks were started (WORLD_SIZE), and rank 3 does not meet them")
    assert output.err.count("\n") == 1
    [seconds] = rank_three
    assert 7 < seconds <= 8


@pytest.mark.slow
def test_the_whole_command_here():
    """Whatever this machine has: each probe says something, and the status is that of the findings."""
    words = [sys.executable, "-m", "thinwire", "doctor", "--json", "--timeout", "100"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    findings = json.loads(done.stdout)
    assert done.returncode == any(finding["level"] == "fault" for finding in findings)
    told = "\n".join(finding["what"] for finding in findings)
    for word in (f"torch {torch.__version__}, gloo", "sparse-compress has ", "mpi4py", "slow link", "no network"):
        assert word in told
    assert "not done within" not in told


def test_a_reader_that_has_seen_enough_gets_no_traceback():
    words = [sys.executable, "-m", "thinwire", "--help"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert (process.stderr.read(), process.wait(100)) == ("", 141)
