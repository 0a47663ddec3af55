"""One run at a time in a folder, and none that waits for the dead."""

import fcntl
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from communicators import Communicator, SimulatedWorld, as_communicator
from thinwire_trainer.app import App
from thinwire_trainer.command_line.options import Options
from thinwire_trainer.errors import AgreedError
from thinwire_trainer.records import folder_lock
from thinwire_trainer.records.folder_lock import locked
from thinwire_trainer.records.metrics import read_metrics
from thinwire_trainer.run import run

ALONE = as_communicator(None)
HOLDER = """
import sys
from pathlib import Path
from communicators import as_communicator
from thinwire_trainer.records.folder_lock import locked
with locked(Path(sys.argv[1]), as_communicator(None)):
    print("held", flush=True)
    sys.stdin.read()
"""


def held_elsewhere(folder: Path) -> subprocess.Popen[str]:
    """Another process that holds the folder until it is killed or its input ends."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], text=True, **pipes)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_another_process_is_kept_out_by_name_and_let_in_as_soon_as_the_holder_is_killed(tmp_path: Path) -> None:
    holder = held_elsewhere(tmp_path)
    try:
        expected = f"in use by process {holder.pid} on {platform.node()} since .*--output"
        with pytest.raises(AgreedError, match=expected), locked(tmp_path, ALONE):
            pass
    finally:
        holder.kill()
        holder.communicate()
    assert (tmp_path / "lock").exists()
    with locked(tmp_path, ALONE):
        assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
    assert not (tmp_path / "lock").exists()


def test_a_second_run_does_not_touch_what_the_first_one_writes(
    app: App, options: Callable[..., Options], tmp_path: Path
) -> None:
    given = options()
    SimulatedWorld(2).run(lambda comm: run(app, given, comm))
    before = sorted((path, path.stat().st_mtime_ns) for path in given.output.rglob("*") if path.is_file())
    holder = held_elsewhere(given.output)
    try:
        for second in (replace(given, overwrite=True), replace(given, resume="latest"), given):
            with pytest.raises(AgreedError, match="in use by process"):
                SimulatedWorld(2).run(lambda comm, second=second: run(app, second, comm))
    finally:
        holder.communicate(timeout=60)
    assert before == sorted((path, path.stat().st_mtime_ns) for path, _ in before)
    SimulatedWorld(2).run(lambda comm: run(app, replace(given, resume="latest"), comm))
    assert [row["epoch"] for row in read_metrics(given.output / "metrics.jsonl")] == [1, 2]


def foreign(folder: Path) -> Path:
    """The lock of a run on another machine, whose system lock does not reach this one."""
    path = folder / "lock"
    path.write_text(json.dumps({"host": "elsewhere", "pid": 1, "since": "yesterday"}))
    return path


def test_a_lock_that_another_machine_left_holds_nobody_up(tmp_path: Path) -> None:
    path = foreign(tmp_path)
    with locked(tmp_path, ALONE):
        assert json.loads(path.read_text())["host"] == platform.node()


def test_where_the_file_system_has_no_locks_the_file_itself_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(folder_lock.NO_LOCKS[0], "not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    with locked(tmp_path, ALONE), pytest.raises(AgreedError, match="in use"), locked(tmp_path, ALONE):
        pass
    with locked(tmp_path, ALONE):
        pass
    path = foreign(tmp_path)
    with (
        pytest.raises(AgreedError, match=f"process 1 on elsewhere since yesterday.*delete {path}"),
        locked(tmp_path, ALONE),
    ):
        pass


@pytest.mark.parametrize("content", [b"", b"\xff\x00", b"[]", b'{"host": 3, "pid": "x", "since": 0}', b"{}"])
def test_what_no_run_has_written_holds_nobody_up(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "lock").write_bytes(content)
    with locked(tmp_path, ALONE):
        pass


def test_a_pipe_or_folder_in_its_place_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "lock")
    with pytest.raises(AgreedError, match="is not a file"), locked(tmp_path, ALONE):
        pass
    (tmp_path / "lock").unlink()
    (tmp_path / "lock").mkdir()
    with pytest.raises(AgreedError, match="directory"), locked(tmp_path, ALONE):
        pass


def test_ranks_that_do_not_see_rank_0s_folder_say_so(tmp_path: Path) -> None:
    def body(comm: Communicator) -> None:
        own = tmp_path / ("shared" if comm.rank < 2 else "own")
        own.mkdir(exist_ok=True)
        with pytest.raises(AgreedError, match=r"not the folder that rank 0 sees.*on rank 2 of 3"), locked(own, comm):
            pass

    SimulatedWorld(3).run(body)
    assert not (tmp_path / "shared" / "lock").exists()
