"""A full disk ends a run in one line on all ranks, and leaves the last good checkpoint; so do unusable folders."""

import contextlib
import errno
import io
import os
import resource
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from communicators import Communicator, SimulatedWorld
from thinwire_trainer.app import App
from thinwire_trainer.command_line.options import Options
from thinwire_trainer.launching.ending import exit_code
from thinwire_trainer.launching.placement import Placement
from thinwire_trainer.records.metrics import Events
from thinwire_trainer.records.run_folder import RunFolder
from thinwire_trainer.run import run


def ended(app: App, options: Options, *, output: io.StringIO | None = None) -> tuple[list[int], list[str]]:
    """Exit codes of two ranks and all that they said."""
    error, codes = io.StringIO(), [-1, -1]

    def rank(comm: Communicator) -> None:
        place = Placement(launcher="mpiexec", rank=comm.rank, size=1)  # 1: nothing to abort
        codes[comm.rank] = exit_code(lambda: run(app, options, comm), place, program="points")

    with contextlib.redirect_stderr(error), contextlib.redirect_stdout(output or io.StringIO()):
        SimulatedWorld(2).run(rank)
    return codes, error.getvalue().splitlines()


@contextlib.contextmanager
def largest_file(nbytes: int) -> Iterator[None]:
    """Stands for a disk that is full beyond so many bytes a file; Python ignores SIGXFSZ, so that writing fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    assert signal.getsignal(signal.SIGXFSZ) == signal.SIG_IGN
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture(scope="module")
def sizes(points_app: App, tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    """Of all files that a run writes: below each of them something else is the first that has no room."""
    from thinwire_trainer.command_line.flags import parse

    folder = tmp_path_factory.mktemp("sizes")
    flags = f"--algorithm gtopk --batch-size 4 --max-epochs 2 --checkpoint-every 2 --output {folder}"
    SimulatedWorld(2).run(lambda comm: run(points_app, parse(flags.split(), points_app, world_size=None), comm))
    return sorted({path.stat().st_size for path in folder.rglob("*") if path.is_file()})


def test_without_room_for_a_file_all_ranks_end_with_one_line(
    app: App, options: Callable[..., Options], sizes: list[int]
) -> None:
    assert len(sizes) > 3
    for size in sizes:
        for room in (size - 1, size // 2):
            given = options(algorithm="gtopk", checkpoint_every=2, overwrite=True)
            with largest_file(room):
                codes, lines = ended(app, given)
            assert codes == [1, 1], (room, lines)
            assert len(lines) == 1, (room, lines)
            there = RunFolder(given.output).config.exists()
            advice = "go on with --resume" if there else "start again"
            assert lines[0].split(" (on rank")[0].endswith(f": make room, then {advice}"), room


@pytest.mark.parametrize("kept", [None, {"words": "long " * 40}])
@pytest.mark.parametrize("name", ["lock", "config.json", "task.json"])
def test_without_room_at_the_start_the_advice_can_be_taken(
    app: App,
    options: Callable[..., Options],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    kept: dict[str, str] | None,
) -> None:
    monkeypatch.setattr("thinwire_trainer.run._kept", lambda task: kept)
    real = os.fsync

    def full(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").resolve().name.startswith(name):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    given = options(max_epochs=1)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        codes, lines = ended(app, given)
    if name == "task.json" and kept is None:
        assert (codes, lines) == ([0, 0], [])
        return
    assert (codes, len(lines)) == ([1, 1], 1)
    assert "No space left on device: make room, then start again" in lines[0]
    assert ended(app, given) == ([0, 0], [])


def test_the_last_good_checkpoint_stays_and_is_gone_on_from(app: App, options: Callable[..., Options]) -> None:
    given = options(algorithm="gtopk", checkpoint_every=2, lr_schedule="constant", max_epochs=1)
    assert ended(app, given) == ([0, 0], [])
    folder = RunFolder(given.output)
    last = folder.checkpoints.complete()[-1]
    longer = replace(given, max_epochs=2, resume="latest")
    with largest_file(folder.metrics.path.stat().st_size + 10):
        codes, lines = ended(app, longer)
    assert (codes, len(lines)) == ([1, 1], 1)
    assert folder.checkpoints.complete()[-1] == last
    assert ended(app, longer) == ([0, 0], [])


def test_without_room_for_another_epoch_in_the_metrics(app: App, options: Callable[..., Options]) -> None:
    given = options(checkpoint_every=0, max_epochs=9)
    with largest_file(1500):  # the settings fit
        codes, lines = ended(app, given)
    assert codes == [1, 1]
    assert len(lines) == 1
    assert "metrics.jsonl: File too large: make room" in lines[0]


@pytest.mark.parametrize("full", [("trace.json",), ("trace.json", "rank")])
def test_without_room_for_a_trace(
    app: App, options: Callable[..., Options], monkeypatch: pytest.MonkeyPatch, full: tuple[str, ...]
) -> None:
    """At the end of an epoch, or after a checkpoint has found no room in its middle, which is then the reason."""
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").resolve().name.startswith(full):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    codes, lines = ended(app, options(profile=True, batch_size=2, checkpoint_every=9))
    assert (codes, len(lines)) == ([1, 1], 1), lines
    assert "No space left on device: make room, then go on with --resume" in lines[0]
    assert f"{full[-1]}" in lines[0]


def test_without_room_for_torchs_own_trace_the_temporary_folder_is_named(
    app: App, options: Callable[..., Options]
) -> None:
    given = options(profile=True, batch_size=2, checkpoint_every=0)
    with largest_file(3000):  # all but traces fit
        codes, lines = ended(app, given)
    assert (codes, len(lines)) == ([1, 1], 1), lines
    assert "make room, or set TMPDIR to another folder (on rank" in lines[0]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard's thread says it too
@pytest.mark.parametrize("room", [20, 1600])
def test_without_room_for_the_events_of_tensorboard_their_folder_is_named(
    app: App, options: Callable[..., Options], monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    """At the start, or in an epoch."""
    pytest.importorskip("tensorboard")
    opens = Events.__init__

    def full(self: Events, folder: Path, *, first_step: int) -> None:
        stack.enter_context(largest_file(room))
        opens(self, folder, first_step=first_step)

    monkeypatch.setattr(Events, "__init__", full)
    with contextlib.ExitStack() as stack:
        codes, lines = ended(app, options(checkpoint_every=0, tensorboard=True))
    assert codes == [1, 1]
    assert "/run/events: File too large: make room, then go on with --resume" in lines[-1]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB, or of whatever mount can make."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True)
        reason = done.stderr.strip()
    except FileNotFoundError as error:
        reason = str(error)
    if reason:
        pytest.skip(f"no small file system can be mounted here: {reason}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_small_disk_fills_up(app: App, options: Callable[..., Options], small_disk: Path) -> None:
    given = options(algorithm="gtopk", checkpoint_every=2, output=small_disk / "run")
    codes, lines = ended(app, given)
    good = RunFolder(given.output).checkpoints.complete()
    assert codes == [1, 1]
    assert len(lines) == 1
    assert "No space left on device: make room" in lines[0]
    assert good, "64 KiB hold the first checkpoint, not three"
    subprocess.run(["mount", "-o", "remount,size=1m", str(small_disk)], check=True)
    assert ended(app, replace(given, resume="latest")) == ([0, 0], [])


def test_a_read_only_disk_is_refused_before_training(
    app: App, options: Callable[..., Options], small_disk: Path
) -> None:
    for path in ("run", "new"):
        given = options(output=small_disk / path, max_epochs=1)
        if path == "run":
            assert ended(app, given) == ([0, 0], [])
        subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
        readonly, has_run = "Read-only file system", path == "run"
        for second, says in (
            (given, readonly),
            (replace(given, resume="latest"), readonly if has_run else "holds no run to resume"),
            (replace(given, overwrite=True), readonly),
        ):
            codes, lines = ended(never_trained(app), second)
            assert codes == [1, 1]
            assert len(lines) == 1
            assert says in lines[0]
        subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)


def never_trained(app: App) -> App:
    def build(options: Options, device: object) -> object:
        task = app.build(options, device)  # type: ignore[arg-type]
        task.loss = None  # type: ignore[method-assign, assignment]
        return task

    return replace(app, build=build)  # type: ignore[arg-type]


def test_an_output_that_is_no_folder_is_refused_before_training(app: App, options: Callable[..., Options]) -> None:
    output = options().output
    output.write_text("mine")
    for path in (output, output / "below"):
        codes, lines = ended(never_trained(app), options(output=path))
        assert codes == [1, 1]
        assert len(lines) == 1
        assert str(output) in lines[0]
    assert output.read_text() == "mine"
    output.unlink()
    os.symlink("nowhere", output)
    codes, lines = ended(never_trained(app), options())
    assert (codes, len(lines)) == ([1, 1], 1)
    assert "is not a folder: give another one with --output" in lines[0]


class Full(io.StringIO):
    """Standard output on a full disk."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_standard_output_without_room_ends_all_ranks(app: App, options: Callable[..., Options]) -> None:
    assert ended(app, options()) == ([0, 0], [])
    for given in (options(overwrite=True), options(resume="latest")):
        codes, lines = ended(app, given, output=Full())
        assert codes == [1, 1]
        assert len(lines) == 1
        assert "standard output: No space left on device" in lines[0]
