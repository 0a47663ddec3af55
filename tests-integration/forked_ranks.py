"""Ranks that have torch when they begin: forks of one process, since every import of it takes a second or two.

Each connection is one launch: a request in, [exit status of each rank] out, both JSON. A rank is a process and a
session of its own, runs its script as `python SCRIPT` or `python -m MODULE` would, and ends as an interpreter ends, but
that modules are not taken apart; all are ended where who asked is gone. They share one seed of hashes, which
interpreters that mpiexec starts do not. With one rank may come descriptors, see mpi_rank.py: of its output, and of its
way to mpiexec.

usage: python forked_ranks.py DESCRIPTOR (of a listening socket); ends with its standard input
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
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
from typing import Any

import torch._dynamo  # an optimizer's first step asks for it
import torch.distributed  # noqa: F401


@dataclass
class Rank:
    """words: what stands behind `python`. folder: where it runs. Output goes to the files, else to the descriptors."""

    words: list[str]
    folder: str
    environment: dict[str, str]
    stdout: str | int
    stderr: str | int


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
    request = received(connection)
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


def received(connection: socket.socket) -> dict[str, Any]:
    """A request, in which the descriptors that came with it stand."""
    text, descriptors, _, _ = socket.recv_fds(connection, 1 << 16, 3)
    while not text.endswith(b"\n"):
        text += connection.recv(1 << 16)
    request: dict[str, Any] = json.loads(text)
    if descriptors:
        [rank] = request["ranks"]
        rank["stdout"], rank["stderr"], pmi = descriptors
        rank["environment"]["PMI_FD"] = str(pmi)
    return request


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
                    os.kill(pid, signal.SIGUSR1)  # it says where it stands
                    time.sleep(0.5)
                    os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                statuses[pid] = None
        if select.select([connection], [], [], 0.01)[0]:  # closed: nothing more is sent there
            end = 0.0
    return [statuses[pid] for pid in pids]


def become(rank: Rank) -> None:
    os.setsid()
    for descriptor, where in enumerate((os.devnull, rank.stdout, rank.stderr)):
        opened = where if isinstance(where, int) else os.open(where, os.O_RDWR | os.O_CREAT, 0o600)
        os.dup2(opened, descriptor)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
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


def keep_modules() -> None:
    """Hides what is imported from the interpreter's end, which would take it apart, and so copy what the forks share.

    Called after what the rank has for its end. Threads, MPI and torch's libraries end as ever.
    """
    kept = dict(sys.modules)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
    for name in set(kept) - {"sys", "builtins"}:
        del sys.modules[name]


if __name__ == "__main__":
    mine = rank_of(socket.socket(fileno=int(sys.argv[1])))
    if mine is not None:
        atexit.register(keep_modules)
        become(mine)
