"""Elastic groups of real processes: kill −9, SIGSTOP, joining, and the server's end."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from torch.distributed import TCPStore

RANK = Path(__file__).with_name("elastic_rank.py")
SECONDS = 60.0
TIMEOUT = 5.0


class Process:
    """A process whose lines are read as they come."""

    def __init__(self, *command: object) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, *map(str, command)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.pid, self._lines = self._popen.pid, queue.Queue[str]()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._popen.stdout:
            self._lines.put(line)
        self._popen.stdout.close()

    def line(self, wanted: str) -> re.Match[str]:
        """Next line that matches."""
        end = time.monotonic() + SECONDS
        while True:
            if found := re.match(wanted, self._lines.get(timeout=max(end - time.monotonic(), 0.01))):
                return found

    def forget(self) -> None:
        """Drops the lines that nobody has read."""
        while not self._lines.empty():
            self._lines.get()

    def step(self, size: int) -> tuple[int, float, float]:
        """Number, ledger and time of the next step in a group of so many."""
        found = self.line(rf"step (\d+) {size} \d+ (\S+) (\S+)")
        return int(found[1]), float(found[2]), float(found[3])

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def end(self) -> None:
        self._popen.kill()
        self._popen.wait(SECONDS)


@pytest.fixture
def start():
    started: list[Process] = []

    def one(*command: object) -> Process:
        started.append(Process(*command))
        return started[-1]

    yield one
    for process in started:
        process.end()


def served(start, port: int = 0) -> tuple[Process, str]:
    server = start("-m", "communicators.elastic", "--port", port)
    bound = server.line(r".* port (\d+)")[1]
    return server, f"127.0.0.1:{bound}"


def rank(start, address: str, at_least: int = 1, numel: int = 3) -> Process:
    return start(RANK, address, at_least, TIMEOUT, numel)


def agree(*ranks: Process, size: int) -> None:
    """Their ledgers are equal at one step."""
    told = [{} for _ in ranks]
    for process in ranks:
        process.forget()
    for one, process in zip(told, ranks, strict=True):
        for _ in range(50):
            step, ledger, _ = process.step(size)
            one[step] = ledger
    common = set.intersection(*map(set, told))
    assert common
    for step in common:
        assert len({one[step] for one in told}) == 1


@pytest.mark.few(0)
def test_killed_joined_stopped_and_without_a_server(start):
    server, address = served(start)
    ranks = [rank(start, address, at_least=2) for _ in range(3)]
    for one in ranks:
        one.step(3)
    began = time.time()
    ranks.pop(0).signal(signal.SIGKILL)
    killed = max(one.step(2)[2] for one in ranks) - began
    assert killed < TIMEOUT

    ranks.append(rank(start, address, at_least=2))
    joined = float(ranks[-1].line(r"entered \d+ (\S+)")[1])
    agree(*ranks, size=3)

    began = time.time()
    ranks[0].signal(signal.SIGSTOP)
    stopped = max(one.step(2)[2] for one in ranks[1:]) - began
    assert stopped < TIMEOUT + 5
    ranks[0].signal(signal.SIGCONT)
    assert ranks.pop(0).line(r"LeftOutError .* was left out of generation \d+")

    server.end()
    agree(*ranks, size=2)
    served(start, int(address.rpartition(":")[2]))
    ranks.append(rank(start, address, at_least=2))
    agree(*ranks, size=3)
    print(f"kill to next exchange {killed:.2f} s, stop {stopped:.2f} s, joined {joined:.2f} s")


def test_who_comes_to_a_new_server_joins_those_who_train(start):
    """Though it could train alone, and comes before they tell the new server that they are there."""
    server, address = served(start)
    one = rank(start, address)
    one.step(1)
    server.end()
    newcomer = rank(start, address)
    time.sleep(2)  # it waits for the server
    served(start, int(address.rpartition(":")[2]))
    newcomer.line(r"entered 2 ")
    agree(one, newcomer, size=2)


def test_nobody_at_the_address(start):
    assert start(RANK, "127.0.0.1:1", 1, TIMEOUT, 3, 1).line("TimeoutError .*127.0.0.1:1")


@pytest.mark.few(0)
def test_who_is_interrupted_in_an_exchange_is_lost_to_the_others_who_go_on(start):
    _, address = served(start)
    first, interrupted, late = [rank(start, address) for _ in range(3)]
    for one in (first, interrupted, late):
        one.step(3)
    late.signal(signal.SIGSTOP)
    time.sleep(0.5)  # the others wait for it in an exchange
    interrupted.signal(signal.SIGINT)
    time.sleep(1)
    late.signal(signal.SIGCONT)
    agree(first, late, size=2)


@pytest.mark.few(0)
def test_who_waits_for_ranks_that_have_all_died_begins_where_the_meeting_place_is_started_anew(start):
    server, address = served(start)
    dead = rank(start, address)
    dead.step(1)
    dead.signal(signal.SIGKILL)
    newcomer = rank(start, address)
    host, port = address.split(":")
    store = TCPStore(host, int(port), wait_for_workers=False)
    while store.get("thinwire/line") == b"[]":
        time.sleep(0.1)
    time.sleep(1)  # it waits for them
    server.end()
    served(start, int(port))
    newcomer.line(r"entered 1 ")
    agree(newcomer, size=1)
