"""Checkpoints: complete or not there, and never silently wrong."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from communicators import Communicator, SimulatedWorld, as_communicator
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from thinwire_trainer.errors import AgreedError, DamagedError, RunError
from thinwire_trainer.records.checkpoint import NAME, Checkpoints, Manifest, load
from thinwire_trainer.records.metrics import MetricsFile

pytestmark = pytest.mark.quick

ALONE = as_communicator(None)


def state(step: int, rank: int = 0) -> dict[str, Any]:
    return {"weights": torch.arange(5) + step, "rank": rank, "nested": {"lr": 0.1}}


def save(checkpoints: Checkpoints, step: int, comm: Communicator = ALONE) -> None:
    checkpoints.save(
        step,
        state(step, comm.rank),
        comm,
        metrics=MetricsFile(checkpoints.path / "metrics.jsonl"),
        settings={"lr": 0.1},
    )


def load_latest(checkpoints: Checkpoints, rank: int = 0) -> tuple[Manifest, dict[str, Any]]:
    folder = checkpoints.choose("latest")
    assert folder is not None
    manifest = Manifest.read(folder)
    return manifest, load(folder, manifest, rank)


def test_every_rank_gets_its_own_state_back_and_two_checkpoints_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)

    def body(comm: Communicator) -> None:
        for step in (1, 2, 3):
            save(checkpoints, step, comm)

    SimulatedWorld(3).run(body)
    assert [folder.name for folder in checkpoints.complete()] == ["00000002", "00000003"]
    for rank in range(3):
        manifest, loaded = load_latest(checkpoints, rank)
        assert (manifest.step, manifest.metrics_nbytes, len(manifest.files)) == (3, 0, 3)
        assert (loaded["rank"], loaded["weights"].tolist()) == (rank, [3, 4, 5, 6, 7])
    previous = checkpoints.choose("previous")
    assert previous is not None
    checkpoints.discard_after(previous)
    assert checkpoints.choose("latest") == previous


def test_a_run_without_checkpoints(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "none")
    assert checkpoints.choose("latest") is None
    with pytest.raises(RunError, match="no previous one"):
        checkpoints.choose("previous")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    checkpoints = Checkpoints(tmp_path_factory.mktemp("saved"))
    save(checkpoints, 1)
    return checkpoints


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_flipped_or_missing_byte_of_any_file_is_noticed(saved: Checkpoints, tmp_path: Path, data: Any) -> None:
    damaged = Checkpoints(tmp_path / "damaged")
    shutil.rmtree(damaged.path, ignore_errors=True)
    shutil.copytree(saved.path, damaged.path)
    file = damaged.path / "00000001" / data.draw(st.sampled_from([NAME, "rank0.pt"]))
    content = bytearray(file.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        del content[place:]
    else:
        content[place] ^= data.draw(st.integers(1, 255))
    file.write_bytes(content)
    with pytest.raises(DamagedError, match=file.name):
        load_latest(damaged)


def test_a_missing_file_is_named(saved: Checkpoints, tmp_path: Path) -> None:
    damaged = Checkpoints(tmp_path / "damaged")
    shutil.copytree(saved.path, damaged.path)
    (damaged.path / "00000001" / "rank0.pt").unlink()
    with pytest.raises(DamagedError, match=r"rank0\.pt is missing"):
        load_latest(damaged)


class Killed(BaseException):
    """Stands for kill −9: nothing catches it."""


class KilledAt:
    """Kills at the n-th operation on the disk; a file that was being written is left torn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, operation: int) -> None:
        self.left = operation
        for name in ("fsync", "replace", "unlink", "rmdir", "mkdir"):
            monkeypatch.setattr(os, name, self._wrap(name, getattr(os, name)))

    def _wrap(self, name: str, real: Any) -> Any:
        def operation(target: Any, *rest: Any, **options: Any) -> Any:
            self.left -= 1
            if self.left < 0:
                if name == "fsync" and self.left == -1:
                    tear(target)
                raise Killed
            return real(target, *rest, **options)

        return operation


def tear(descriptor: int) -> None:
    path = Path(f"/proc/self/fd/{descriptor}").resolve()
    if path.is_file():
        os.truncate(path, path.stat().st_size // 2)


def test_a_kill_at_any_moment_of_the_third_save_leaves_a_good_checkpoint(tmp_path: Path) -> None:
    found = []
    for operation in range(100):
        checkpoints = Checkpoints(tmp_path / str(operation))
        save(checkpoints, 1)
        save(checkpoints, 2)
        with pytest.MonkeyPatch.context() as monkeypatch:
            KilledAt(monkeypatch, operation)
            try:
                save(checkpoints, 3)
            except Killed:
                found.append(load_latest(checkpoints)[0].step)
                assert load_latest(checkpoints)[1]["weights"][0] == found[-1]
                continue
        break
    else:
        pytest.fail("the save never ended")
    assert len(found) > 5
    assert found == sorted(found)  # 2 until the manifest is in place, then 3
    assert set(found) == {2, 3}
    for folder in tmp_path.iterdir():  # what a killed save left does not stand in the next one's way
        save(Checkpoints(folder), 3)
        assert load_latest(Checkpoints(folder))[0].step == 3


def test_a_full_disk_on_one_rank_fails_on_all_and_leaves_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = torch.save

    def full(state: dict[str, Any], file: Any) -> None:
        if state["rank"] == 1:
            raise OSError("no space left on device")
        real(state, file)

    monkeypatch.setattr(torch, "save", full)

    def body(comm: Communicator) -> None:
        with pytest.raises(AgreedError, match="no space left"):
            save(Checkpoints(tmp_path), 1, comm)

    SimulatedWorld(3).run(body)
    assert Checkpoints(tmp_path).complete() == []
