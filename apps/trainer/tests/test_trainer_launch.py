"""Starting one's own workers: command, exit code, signals. A script stands in for mpiexec."""

import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import communicators
import pytest
import torch
from thinwire_trainer.app import App
from thinwire_trainer.command import main
from thinwire_trainer.errors import RunError
from thinwire_trainer.launching import ending, placement, workers
from thinwire_trainer.launching.placement import Placement, joined
from thinwire_trainer.launching.workers import Job, run_job

pytestmark = pytest.mark.quick


def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    script = tmp_path / "mpiexec"
    script.write_text(f"#!{sys.executable}\nimport os, signal, sys, time\n{program}\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))


def test_the_launcher_beside_python_gets_the_command_and_its_exit_code_is_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    stand_in(tmp_path, monkeypatch, "print(sys.argv[1:], os.environ['OMP_NUM_THREADS']); sys.exit(2)")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert workers.start_workers("points", ["--lr", "0.1"], 3) == 2
    expected = ["-n", "3", str(tmp_path / "python"), "-m", "points", "--lr", "0.1"]
    assert capfd.readouterr() == (f"{expected} 1\n", "")


@pytest.mark.parametrize("code", [9, 128 + signal.SIGKILL])
def test_a_killed_worker_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: int
) -> None:
    stand_in(tmp_path, monkeypatch, f"sys.exit({code})")
    assert workers.start_workers("points", [], 2) == code
    assert capsys.readouterr().err == (
        "points: error: a worker was killed, which the system does where memory runs out, and mpiexec ended with code "
        f"{code}; --resume goes on from the last checkpoint\n"
    )


def test_a_killed_launcher_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(tmp_path, monkeypatch, "os.kill(os.getpid(), signal.SIGKILL)")
    assert workers.start_workers("points", [], 2) == 128 + signal.SIGKILL
    assert capsys.readouterr().err == (
        "points: error: mpiexec was ended by signal 9; --resume goes on from the last checkpoint\n"
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_reach_the_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    program = f"""
signal.signal({int(number)}, lambda *_: sys.exit(3))
os.kill(os.getppid(), {int(number)})
while True: time.sleep(0.02)  # pause() would sleep through a signal that comes just before it
"""
    stand_in(tmp_path, monkeypatch, program)
    assert workers.start_workers("points", [], 2) == 3


def test_what_a_terminal_sends_comes_to_the_workers_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C is for all of the terminal's group, mpiexec too, which we tell as well: by a second one it aborts."""
    stand_in(tmp_path, monkeypatch, "sys.exit(3 if os.getpgrp() == os.getpgid(os.getppid()) else 0)")
    assert workers.start_workers("points", [], 2) == 0


@pytest.mark.parametrize(
    "ends", ["sys.exit(255)", "sys.exit(15)", "sys.exit(137)", "os.kill(os.getpid(), signal.SIGKILL)"]
)
def test_workers_that_ended_by_force_after_a_signal_are_told_of_with_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ends: str
) -> None:
    stand_in(
        tmp_path,
        monkeypatch,
        f"""
def end(*_):
    {ends}
signal.signal(signal.SIGTERM, end)
os.kill(os.getppid(), signal.SIGTERM)
while True: time.sleep(0.02)
""",
    )
    assert workers.start_workers("points", [], 2) == 128 + signal.SIGTERM
    assert capsys.readouterr().err == "points: error: stopped by SIGTERM\n"


def test_a_signal_amid_the_handling_of_another_is_handed_on_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a shell's `timeout` sends them: to us, and to our group. Each reaches the launcher once."""
    told = tmp_path / "told"
    stand_in(
        tmp_path,
        monkeypatch,
        f"""
def tell(number, frame):
    with open({str(told)!r}, "a") as file: print(number, file=file)
    if open({str(told)!r}).read().count(chr(10)) == 2: os._exit(number)
for number in (signal.SIGTERM, signal.SIGINT): signal.signal(number, tell)
os.kill(os.getppid(), signal.SIGTERM)
signal.alarm(60)
while True: time.sleep(0.02)
""",
    )
    begin = threading.Timer.start

    def amid(timer: threading.Timer) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        begin(timer)

    monkeypatch.setattr(threading.Timer, "start", amid)
    assert workers.start_workers("points", [], 2) in (128 + signal.SIGTERM, 128 + signal.SIGINT)
    assert sorted(map(int, told.read_text().split())) == [signal.SIGINT, signal.SIGTERM]
    assert "error: stopped by SIG" in capsys.readouterr().err


def test_a_signal_before_the_workers_are_there_waits_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch, "signal.alarm(60)\nwhile True: time.sleep(0.02)")
    ready = workers.worker_environment

    def interrupted() -> dict[str, str]:
        os.kill(os.getpid(), signal.SIGTERM)
        return ready()

    monkeypatch.setattr(workers, "worker_environment", interrupted)
    assert workers.start_workers("points", [], 2) == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("backend", "group", "transport"), [("gloo", "gloo", None), ("nccl", "cpu:gloo,cuda:nccl", "nccl")]
)
def test_ranks_without_mpi_meet_by_gloo_or_where_asked_by_nccl(
    monkeypatch: pytest.MonkeyPatch, backend: str, group: str, transport: str | None
) -> None:
    """No GPU is needed to see what is asked of torch.distributed."""
    seen: list[object] = []

    def group_made(name: str, address: object = None, *, store: object = None, rank: int, world_size: int) -> None:
        seen.extend((name, address or store, rank, world_size))

    monkeypatch.setattr(torch.distributed, "init_process_group", group_made)
    monkeypatch.setattr(torch.distributed, "TCPStore", lambda *given: given)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: seen.append("end"))
    monkeypatch.setattr(communicators, "as_communicator", lambda comm, *, transport=None: transport)
    for place, meeting in (
        (Placement(launcher="torchrun", rank=1, size=2), "env://"),
        (
            Placement(launcher="srun", rank=1, size=2, meeting="node1:20001"),
            ("node1", 20001, 2, False, timedelta(minutes=2)),
        ),
    ):
        with joined(place, backend) as comm:
            assert comm == transport
        assert seen == [group, meeting, 1, 2, "end"]
        seen.clear()


def test_nccl_is_refused_where_mpi_carries_the_messages(
    app: App, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RANK", "WORLD_SIZE", "PMI_RANK", "PMI_SIZE", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    assert main(app, ["--backend", "nccl"]) == 2
    assert capsys.readouterr().err == (
        "points: error: --backend nccl is for ranks of torchrun, or srun without MPI: leave it out\n"
    )


@pytest.mark.parametrize("rank", [None, 0, 1])
def test_no_gpu_is_a_wrong_command_line_on_all_ranks(
    app: App, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: int | None
) -> None:
    """MPI's Abort would add lines of its own."""

    class World:
        def allgather(self, complaint: str) -> list[str]:
            return [complaint] * 2

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(ending, "_abort", lambda place: None)
    monkeypatch.setattr(placement, "_mpi_world", lambda place: World())
    for name in ("RANK", "WORLD_SIZE", "PMI_RANK", "PMI_SIZE", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    if rank is not None:
        monkeypatch.setenv("PMI_RANK", str(rank))
        monkeypatch.setenv("PMI_SIZE", "2")
    assert main(app, ["--device", "cuda"]) == 2
    line = (
        "points: error: --device cuda, but torch sees no GPU here: give --device cpu, or look at CUDA_VISIBLE_DEVICES\n"
    )
    assert capsys.readouterr().err == ("" if rank else line)


def test_death_by_a_signal_is_no_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch, "os.kill(os.getpid(), signal.SIGKILL)")
    assert workers.start_workers("points", [], 2) == 137


def test_without_a_launcher_it_says_how_to_get_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RunError, match="pip install mpich"):
        workers.find_mpiexec()


def test_more_workers_than_the_cores_bear_are_asked_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch, "sys.exit(7)")
    cores = len(os.sched_getaffinity(0))
    most = workers.WORKERS_A_CORE * cores
    with pytest.raises(RunError, match=f"--nworkers {most + 1} is more than 8 .*--oversubscribe"):
        workers.start_workers("points", [], most + 1)
    assert workers.start_workers("points", [], most) == 7
    assert workers.start_workers("points", [], 1000, oversubscribe=True) == 7


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent was killed")
def test_the_workers_end_when_the_process_that_started_them_is_killed(tmp_path: Path) -> None:
    script, told = tmp_path / "mpiexec", tmp_path / "told"
    os.mkfifo(told)
    script.write_text(
        f"#!{sys.executable}\nimport os, signal, sys, time\n"
        f"pipe = os.open({str(told)!r}, os.O_WRONLY)\n"  # no file of Python's: the signal may come in mid-print
        "signal.signal(signal.SIGTERM, lambda *_: (os.write(pipe, b'ended\\n'), sys.exit()))\n"
        "os.write(pipe, b'up\\n')\nsignal.alarm(60)\nwhile True: time.sleep(0.02)\n"
    )
    script.chmod(0o755)
    program = (
        "from thinwire_trainer.launching import workers\n"
        f"workers.find_mpiexec = lambda: {str(script)!r}\n"
        "workers.start_workers('m', [], 2)"
    )
    with subprocess.Popen([sys.executable, "-c", program]) as starter, told.open() as lines:
        assert lines.readline() == "up\n"
        starter.kill()
        assert lines.readline() == "ended\n"  # "": it went on until the alarm


@pytest.mark.parametrize(("grace", "starting"), [(0.1, 0.0), (60.0, 4.0)])
def test_a_launcher_that_does_not_end_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grace: float, starting: float
) -> None:
    """Sooner where it has just begun: its workers may have missed the signal."""
    program = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.kill(os.getppid(), signal.SIGTERM)
signal.alarm(60)
while True: time.sleep(0.02)
"""
    stand_in(tmp_path, monkeypatch, program)
    monkeypatch.setattr(workers, "GRACE", grace)
    monkeypatch.setattr(workers, "STARTING", starting)
    began = time.monotonic()
    assert workers.start_workers("points", [], 2) == 143
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("code", [0, 7])
def test_what_comes_afterwards_comes_after_workers_that_ended_well(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, monkeypatch, f"sys.exit({code})")
    called: list[str] = []
    job = Job(workers=2, work=lambda: called.append("work"), afterwards=lambda: called.append("afterwards"))
    assert run_job("points", [], lambda *_: job) == code
    assert called == ["afterwards"] * (code == 0)


def test_one_rank_works_itself_and_a_wrong_command_line_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    called: list[str] = []
    assert run_job("points", [], lambda *_: Job(workers=1, work=lambda: called.append("work"))) == 0
    assert called == ["work"]

    def wrong(*_: object) -> Job:
        raise RunError("--lr is missing")

    assert run_job("points", [], wrong) == 2
    assert capsys.readouterr().err == "points: error: --lr is missing\n"
