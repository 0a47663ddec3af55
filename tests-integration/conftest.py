"""How the tests launch real ranks: by mpiexec, or as processes that find each other through a Store."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MPIEXEC = Path(sys.executable).parent / "mpiexec"
# Unbuffered, Python writes a line and its end apart, and what another rank prints may come between.
ONE_THREAD_WHOLE_LINES = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": ""}


@pytest.fixture(scope="session")
def mpiexec(forking):
    """mpiexec(n, *command) -> CompletedProcess of the whole launch, under a hard timeout.

    interpreters: each rank is one of its own, with its own seed of hashes, and not a fork of one that has torch.
    """

    def launch(n, *command, timeout=200, interpreters=False):
        python = [sys.executable] if interpreters else [sys.executable, "-IS", HERE / "mpi_rank.py", forking]
        command = [str(MPIEXEC), "-n", str(n), *map(str, [*python, *command])]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
        process = subprocess.Popen(command, env={**os.environ, **ONE_THREAD_WHOLE_LINES}, **pipes)
        try:
            output = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.killpg(process.pid, signal.SIGKILL)
            pytest.fail(f"mpiexec -n {n} did not end within {timeout} s\n{process.communicate()}")
        return subprocess.CompletedProcess(command, process.returncode, *output)

    return launch


@pytest.fixture(scope="session")
def forking(tmp_path_factory):
    """The path of the socket where launches are asked for: see forked_ranks.py."""
    path = str(tmp_path_factory.mktemp("forking") / "socket")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        command = [sys.executable, HERE / "forked_ranks.py", str(listener.fileno())]
        given = {"stdin": subprocess.PIPE, "pass_fds": [listener.fileno()]}
        server = subprocess.Popen(command, env={**os.environ, **ONE_THREAD_WHOLE_LINES}, **given)
    yield path
    server.communicate()


@pytest.fixture(scope="session")
def forked(forking, tmp_path_factory):
    """forked(command, environments, timeout, folder) -> a CompletedProcess for each; none is left afterwards."""

    def launch(command, environments, timeout, folder):
        command, output = [*map(str, command)], tmp_path_factory.mktemp("output")
        ranks = [
            {
                "words": command,
                "folder": str(folder),
                "environment": {**os.environ, **ONE_THREAD_WHOLE_LINES, **environment},
                "stdout": str(output / f"stdout-{rank}"),
                "stderr": str(output / f"stderr-{rank}"),
            }
            for rank, environment in enumerate(environments)
        ]
        with socket.socket(socket.AF_UNIX) as asking:
            asking.connect(forking)
            asking.sendall(json.dumps({"ranks": ranks, "timeout": timeout}).encode() + b"\n")
            statuses = json.loads(asking.makefile().read())
        outputs = [[Path(rank[stream]).read_text() for stream in ("stdout", "stderr")] for rank in ranks]
        if None in statuses:
            pytest.fail(f"{command} on {len(ranks)} processes did not end within {timeout} s\n{outputs}")
        for rank, (status, (_, said)) in enumerate(zip(statuses, outputs, strict=True)):
            if status:  # shown where the test fails, which may ask one rank only
                print(f"rank {rank} ended with {status}:\n{said}")
        done = zip(statuses, outputs, strict=True)
        return [subprocess.CompletedProcess(command, status, *output) for status, output in done]

    return launch


@pytest.fixture(scope="session")
def free_port():
    """free_port() -> one below those that the kernel gives to connections: none takes it until a rank listens there."""

    def find():
        while True:
            with socket.socket() as free, contextlib.suppress(OSError):
                port = random.SystemRandom().randrange(20000, 30000)
                free.bind(("127.0.0.1", port))
                return port

    return find


@pytest.fixture(scope="session")
def processes(forked, free_port):
    """processes(n, *command) -> a CompletedProcess for each rank; env:// finds the others."""

    def launch(n, *command, timeout=200):
        world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(n)}
        return forked(command, [{**world, "RANK": str(rank)} for rank in range(n)], timeout, os.getcwd())

    return launch
