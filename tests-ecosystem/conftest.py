"""Two ranks, started as a user starts them, under a hard time limit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest


@pytest.fixture(scope="session")
def torchrun():
    """torchrun(*command, timeout) -> (status, output); none is left afterwards."""

    def launch(*command, timeout=400):
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        process = subprocess.Popen([*words, *map(str, command)], env=environment, start_new_session=True, **pipes)
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            pytest.fail(f"{command} did not end within {timeout} s\n{process.communicate()[0]}")
        return process.returncode, output

    return launch
