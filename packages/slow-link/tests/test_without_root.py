"""The command on real programs, as root and without."""

import os
import shutil
import subprocess
import sys

import pytest
from slow_link import __main__ as command
from slow_link import missing
from slow_link.missing import obstacle

LACKING = missing()
emulated = pytest.mark.skipif(bool(LACKING), reason=f"no emulated link here: {'; '.join(LACKING)}")
# Somebody else in this machine's eyes, who still may open /dev/net/tun, as is usual outside of containers.
WITHOUT_ROOT = ["unshare", "--user", "--map-user=1000", "--map-group=1000"]
# A line is written in one piece, so that no other rank's comes into it.
SUM = """
import os, time
{begin}
begin = time.perf_counter()
{allreduce}
slow = time.perf_counter() - begin >= 0.001 + 2 * 8e-8 * (1 << 18) / 2
os.write(1, f"rank {{{rank}}} {{slow}} {{os.geteuid()}}\\n".encode())
{end}
"""
OVER_MPI = SUM.format(
    begin="from mpi4py import MPI; comm = MPI.COMM_WORLD; comm.Barrier()",
    allreduce="comm.Allreduce(MPI.IN_PLACE, bytearray(1 << 18), op=MPI.BOR)",
    rank="comm.rank",
    end="",
)
OVER_GLOO = SUM.format(
    begin="import torch, torch.distributed as dist; dist.init_process_group('gloo'); x = torch.ones(1 << 16)",
    allreduce="dist.all_reduce(x)",
    rank="dist.get_rank()",
    end="dist.destroy_process_group()  # a thread of gloo's that frees x while Python ends is a SIGABRT",
)


def behind(tmp_path, launch, script, *, before=()):
    file = tmp_path / "sum.py"
    file.write_text(script)
    words = [*before, sys.executable, "-m", "slow_link", "--rate", "100mbit", "--delay", "1ms", "--timeout", "60"]
    done = subprocess.run([*words, "--", *launch, str(file)], capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "100 Mbit/s" in done.stderr
    return sorted(done.stdout.replace("rank", "\nrank").split("\n"))[-2:]


@emulated
@pytest.mark.mpi
@pytest.mark.parametrize("before", [[], WITHOUT_ROOT], ids=["as it is", "without root"])
@pytest.mark.mpich
def test_mpiexec_runs_behind_the_link(before, tmp_path):
    if before and (os.geteuid() != 0 or subprocess.run([*before, "true"], capture_output=True).returncode):
        pytest.skip("root is given up only by root, and where user namespaces are allowed")
    found = behind(tmp_path, ["mpiexec", "-n", "2", sys.executable], OVER_MPI, before=before)
    assert [line.split()[:3] for line in found] == [["rank", "0", "True"], ["rank", "1", "True"]]


@pytest.mark.few(0)
@emulated
def test_torchrun_runs_behind_the_link(tmp_path):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    found = behind(tmp_path, launch, OVER_GLOO)
    assert [line.split()[:3] for line in found] == [["rank", "0", "True"], ["rank", "1", "True"]]


def test_where_it_cannot_be_made_the_reason_is_told(tmp_path):
    """Nothing is started, and nothing runs at full speed instead."""
    forbidden = tmp_path / "unshare"
    forbidden.write_text("#!/bin/sh\necho unshare failed: Operation not permitted >&2\nexit 1\n")
    forbidden.chmod(0o755)
    code = "import os, sys, slow_link.__main__ as s; os.geteuid = lambda: 1000; sys.exit(s.main(sys.argv[1:]))"
    path = f"{tmp_path}:{os.environ['PATH']}"
    words = [sys.executable, "-c", code, "--ranks", "1", "--", "echo", "started"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, env={**os.environ, "PATH": path})
    assert (done.returncode, done.stdout) == (2, "")
    reason = "need root, and user namespaces are not allowed here (unshare failed: Operation not permitted)"
    assert reason in done.stderr


def test_no_unshare_is_an_obstacle(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert obstacle() == "no `unshare` on the PATH (package util-linux)"


@emulated
@pytest.mark.parametrize("before", [[], WITHOUT_ROOT], ids=["as it is", "without root"])
def test_tools_need_not_be_on_the_path_of_a_user(before, tmp_path):
    """Debian's /usr/sbin is not, where tc and sysctl are, elsewhere ip too."""
    if before and (os.geteuid() != 0 or subprocess.run([*before, "true"], capture_output=True).returncode):
        pytest.skip("root is given up only by root, and where user namespaces are allowed")
    for name in ("sh", "mount", "mkdir", "unshare", "true"):
        (tmp_path / name).symlink_to(shutil.which(name))
    words = [*before, sys.executable, "-m", "slow_link", "--ranks", "1", "--", "true"]
    environ = {**os.environ, "PATH": str(tmp_path)}
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, env=environ)
    assert done.returncode == 0, done.stderr


@emulated
def test_the_status_of_a_rank_that_a_signal_ended_is_a_shells():
    words = [sys.executable, "-m", "slow_link", "--ranks", "1", "--", "sh", "-c", "kill -9 $$"]
    assert subprocess.run(words, capture_output=True, timeout=60).returncode == 128 + 9


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--ranks 0 -- true", "expected 1 … 64 ranks, got 0"),
        ("sweep foo", "unrecognized arguments: foo"),
        *((f"check --ranks {ranks}", f"is played by two, got '{ranks}'") for ranks in ("0", "-2", "3", "66", "2.0")),
        *((f"check --repeats {count}", f"a whole number of 2 or more, got '{count}'") for count in ("0", "1", "-1")),
        *((f"--timeout {s} --ranks 1 -- true", f"seconds above 0, such as 60, got '{s}'") for s in ("nan", "0", "-1")),
    ],
)
def test_wrong_arguments_are_told_in_a_line(words, said, capsys, monkeypatch):
    monkeypatch.setattr(command, "enter_user_namespaces", lambda: None)
    try:
        status = command.main(words.split())
    except SystemExit as ended:
        status = ended.code
    told = capsys.readouterr()
    assert (status, told.out) == (2, "")
    assert told.err.splitlines()[-1].endswith(said)


@pytest.mark.parametrize(
    ("error", "said", "status"),
    [
        (RuntimeError("the switch is not running"), "slow_link: the switch is not running", 2),
        (subprocess.TimeoutExpired("sleep", 120.0), "stopped: it did not end within 120 s", 124),
    ],
)
def test_what_fails_on_the_way_is_told_in_a_line(error, said, status, capsys, monkeypatch):
    def fails(argv):
        raise error

    monkeypatch.setattr(command, "enter_user_namespaces", lambda: None)
    monkeypatch.setattr(command, "check_command", fails)
    assert command.main(["check"]) == status
    assert capsys.readouterr().err == f"{said}\n"


def test_a_sweep_without_ip_says_what_is_missing(capsys, monkeypatch):
    monkeypatch.setattr(command, "enter_user_namespaces", lambda: None)
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    assert command.main(["sweep"]) == 2
    assert capsys.readouterr().err == "slow_link: no `ip` on the PATH (packages iproute2, procps)\n"
