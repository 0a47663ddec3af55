"""Ranks that have torch when they begin: forks of one process, since every import of it takes a second or two.

Each connection is one launch: a request in, [exit status of each rank] out, both JSON. A rank is a process and a
session of its own, runs its script as `python SCRIPT` or `python -m MODULE` would, and ends as an interpreter ends; all
are ended where who asked is gone. They share one seed of hashes, which ranks that mpiexec starts do not.

usage: python forked_ranks.py DESCRIPTOR (of a listening socket); ends with its standard input
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import runpy
import select
import signal
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch._dynamo  # an optimizer's first step asks for it
import torch.distributed  # noqa: F401


@dataclass
class Rank:
    """words: what stands behind `python`. folder: where it runs. Output goes to files."""

    words: list[str]
    folder: str
    environment: dict[str, str]
    stdout: str
    stderr: str


def rank_of(listener: socket.socket) -> Rank | None:
    """Serves; returns in the forks, what they are to run, and here at the end, None."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # who keeps a launch ends by itself
    gc.freeze()  # or a collection would copy what all share
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:
            return None
        connection, _ = listener.accept()
        with connection:
            if not os.fork():
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                return launched(connection)


def launched(connection: socket.socket) -> Rank:
    """Forks the ranks, and returns in them only; their parent tells how they ended, and is gone."""
    request = json.loads(connection.makefile().readline())
    ranks, pids = [Rank(**rank) for rank in request["ranks"]], []
    for rank in ranks:
        pids.append(os.fork())
        if not pids[-1]:
            connection.close()
            return rank
    statuses = waited_for(pids, time.monotonic() + request["timeout"], connection)
    with contextlib.suppress(BrokenPipeError):
        connection.sendall(json.dumps(statuses).encode())
    os._exit(0)


def waited_for(pids: list[int], end: float, connection: socket.socket) -> list[int | None]:
    """As Popen.returncode; None for ranks that had to be ended."""
    statuses: dict[int, int | None] = {}
    while len(statuses) < len(pids):
        for pid in set(pids) - set(statuses):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                statuses[pid] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > end:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                statuses[pid] = None
        if select.select([connection], [], [], 0.01)[0]:  # closed: nothing more is sent there
            end = 0.0
    return [statuses[pid] for pid in pids]


def become(rank: Rank) -> None:
    os.setsid()
    for descriptor, path in enumerate((os.devnull, rank.stdout, rank.stderr)):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), descriptor)
    os.chdir(rank.folder)
    os.environ.clear()
    os.environ.update(rank.environment)
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [*(path for path in paths if path and path not in sys.path), *sys.path[1:]]
    if rank.words[0] == "-m":
        sys.argv = rank.words[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(rank.words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = rank.words
        sys.path.insert(0, str(Path(rank.words[0]).parent))
        runpy.run_path(rank.words[0], run_name="__main__")


if __name__ == "__main__":
    mine = rank_of(socket.socket(fileno=int(sys.argv[1])))
    if mine is not None:
        become(mine)
