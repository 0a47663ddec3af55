"""Eager ranks that are real processes, one of which is stopped for longer than the time-out."""

from __future__ import annotations

import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path

RANK = Path(__file__).with_name("elastic_eager_rank.py")
SECONDS = 60.0
TIMEOUT = 2.0


def test_the_others_go_on_without_a_rank_that_is_stopped_which_is_told_so():
    server = started("-m", "communicators.elastic", "--port", "0")
    lines = queue.Queue()
    ranks, readers = [], []
    try:
        port = re.search(r"port (\d+)", server.stdout.readline())[1]
        ranks += [started(RANK, f"localhost:{port}", TIMEOUT) for _ in range(3)]
        readers += [threading.Thread(target=read, args=(rank, lines)) for rank in ranks]
        for reader in readers:
            reader.start()
        met, told = defaultdict(set), []
        until(lines, met, told, lambda: any(size == 3 for _, size in met))
        ranks[2].send_signal(signal.SIGSTOP)
        until(lines, met, told, lambda: sum(size == 2 for _, size in met) >= 3)
        ranks[2].send_signal(signal.SIGCONT)
        until(lines, met, told, lambda: bool(told))
        assert told[0].startswith("LeftOutError")
        assert ranks[2].wait(SECONDS) == 3
        assert [rank.poll() for rank in ranks[:2]] == [None, None]
        assert all(len(weights) == 1 for weights in met.values())
    finally:
        for process in [*ranks, server]:
            process.kill()
            process.wait()
        for reader in readers:
            reader.join()
        for process in [*ranks, server]:
            process.stdout.close()


def started(*command: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )


def read(rank: subprocess.Popen[str], lines: queue.Queue[str]) -> None:
    for line in rank.stdout:
        lines.put(line)


def until(lines, met, told, over) -> None:
    """Takes lines in, until that holds. met: weights by number of rounds and ranks. told: lines of who was left out."""
    end = time.monotonic() + SECONDS
    while not over():
        line = lines.get(timeout=max(end - time.monotonic(), 0.01))
        if found := re.match(r"met (\d+) (\d+) (\S+)", line):
            met[int(found[1]), int(found[2])].add(found[3])
        else:
            told.append(line)
