"""Ranks that come and go, as processes: one is killed, another one joins, and the run goes on from its folder."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from thinwire_trainer.records.metrics import read_metrics
from thinwire_trainer.records.run_folder import RunFolder

SECONDS = 60.0
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def one(*argv: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", *map(str, argv)]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        started.append(process)
        return process

    yield one
    for process in started:
        process.kill()
        process.communicate()


def line(process: subprocess.Popen[str], wanted: str) -> re.Match[str]:
    """Next line that matches: a rank that waits for long for others says so before."""
    assert process.stdout is not None
    return next(found for said in process.stdout if (found := re.search(wanted, said)))


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


def rows(folder: RunFolder) -> list[dict[str, object]]:
    return read_metrics(folder.metrics.path) if folder.metrics.path.exists() else []


@pytest.mark.few(0)
@pytest.mark.timeout(280)
def test_rank_0_is_killed_another_one_joins_and_a_resume_has_fewer_ranks(start: Start, tmp_path: Path) -> None:
    server = start("communicators.elastic", "--port", 0)
    address = f"localhost:{line(server, 'port ([0-9]+)')[1]}"
    flags = "--algorithm gtopk --density 0.1 --dnn mlp --batch-size 48 --lr-schedule constant --at-least 2"
    folder = RunFolder(tmp_path / "run")

    def rank(epochs: int) -> subprocess.Popen[str]:
        run = ["--elastic", address, "--output", folder.path, "--resume", "--max-epochs", epochs]
        return start("thinwire_cifar", *flags.split(), *run)

    ranks = [rank(1000) for _ in range(3)]
    begun = {line(process, r"^rank (\d) of \d (begins|joins)")[1]: process for process in ranks}
    until(lambda: bool(rows(folder)))
    began = time.monotonic()
    begun["0"].send_signal(signal.SIGKILL)
    epochs = len(rows(folder))
    until(lambda: len(rows(folder)) > epochs + 1)
    went_on = time.monotonic() - began
    ranks.append(rank(1000))
    line(ranks[-1], r" took over \d+ bytes of state from rank \d in ")
    line(ranks[-1], r"^rank 2 of 3 joins in epoch \d+\n")
    until(lambda: rows(folder)[-1]["world_size"] == 3)
    for process in ranks:
        process.kill()
    print(f"two epochs after the kill: {went_on:.1f} s")
    server.kill()

    found = rows(folder)
    assert [row["epoch"] for row in found] == list(range(1, len(found) + 1))
    assert {row["world_size"] for row in found} >= {2, 3}
    assert found[-1]["test_accuracy"] > 0.9

    server = start("communicators.elastic", "--port", 0)
    address = f"localhost:{line(server, 'port ([0-9]+)')[1]}"
    last = len(found) + 2
    again = [rank(last) for _ in range(2)]
    told = [process.communicate(timeout=SECONDS)[0] for process in again]
    assert [process.returncode for process in again] == [0, 0], told
    assert f"resumed {folder.path} at step " in "".join(told)
    assert [(row["epoch"], row["world_size"]) for row in rows(folder)[-2:]] == [(last - 1, 2), (last, 2)]
    assert folder.model.exists()
