"""How the tests launch real ranks: by mpiexec, or as processes that find each other through a Store."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

MPIEXEC = Path(sys.executable).parent / "mpiexec"
# Unbuffered, Python writes a line and its end apart, and what another rank prints may come between.
ONE_THREAD_WHOLE_LINES = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": ""}


def _run_all(commands, timeout):
    """Runs processes side by side under one hard timeout; none of them is left afterwards."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    processes = [
        subprocess.Popen(command, env={**os.environ, **ONE_THREAD_WHOLE_LINES, **env}, **pipes)
        for command, env in commands
    ]
    end = time.monotonic() + timeout
    try:
        outputs = [process.communicate(timeout=max(0.1, end - time.monotonic())) for process in processes]
    except subprocess.TimeoutExpired:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.killpg(process.pid, signal.SIGKILL)
        outputs = [process.communicate() for process in processes]
        pytest.fail(f"{commands[0][0]} on {len(commands)} processes did not end within {timeout} s\n{outputs}")
    done = zip(commands, processes, outputs, strict=True)
    return [subprocess.CompletedProcess(command, process.returncode, *output) for (command, _), process, output in done]


@pytest.fixture(scope="session")
def mpiexec():
    """mpiexec(n, *command) -> CompletedProcess of the whole launch."""

    def launch(n, *command, timeout=100):
        [done] = _run_all([([str(MPIEXEC), "-n", str(n), sys.executable, *map(str, command)], {})], timeout)
        return done

    return launch


@pytest.fixture(scope="session")
def processes():
    """processes(n, *command) -> a CompletedProcess for each rank; env:// finds the others."""

    def launch(n, *command, timeout=100):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(n)}
        command = [sys.executable, *map(str, command)]
        return _run_all([(command, {**world, "RANK": str(rank)}) for rank in range(n)], timeout)

    return launch
