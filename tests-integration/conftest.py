"""How the tests launch real ranks: mpiexec of the environment, under a hard timeout."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

MPIEXEC = Path(sys.executable).parent / "mpiexec"


@pytest.fixture(scope="session")
def mpiexec():
    """mpiexec(n, *command) -> CompletedProcess: every process of the launch is gone afterwards."""

    def launch(n, *command, timeout=100):
        process = subprocess.Popen(
            [str(MPIEXEC), "-n", str(n), sys.executable, *map(str, command)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            pytest.fail(f"{command} on {n} ranks did not end within {timeout} s\n{out}\n{err}")
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    return launch
