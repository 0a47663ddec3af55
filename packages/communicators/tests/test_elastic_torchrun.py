"""Elastic groups under torchrun, which restarts all of its workers when one dies."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack

import pytest

SECONDS = 90.0
STEPS = 80
RANK = """
import os, sys, time
import torch
from communicators import Elastic, allreduce

address, at_least, steps, dies = sys.argv[1] or None, *map(int, sys.argv[2:])
attempt, place = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
world = Elastic(address, at_least=at_least, start_with=3, timeout=10)
joining = world.joining
step = world.take()["step"] if joining else 0
entered = f"entered attempt={attempt} step={step} joining={joining} generation={world.generation}"
print(f"\\n{entered}\\n", end="", flush=True)
while step < steps:
    assert world.atomic(lambda: allreduce(torch.ones(3), world)).tolist() == [world.size] * 3
    step += 1
    time.sleep(0.05)
    if dies and (attempt, place, step) == (0, 1, 20):
        os.kill(os.getpid(), 9)
    world.boundary(lambda: {"step": step})
print(f"\\nended attempt={attempt} of {world.size}\\n", end="", flush=True)
"""


@pytest.fixture
def torchrun(tmp_path):
    """Starts `torchrun --nnodes 1` on this many workers; what it and they say, once it has ended well."""
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    with ExitStack() as running:

        def start(workers: int, address: str, *arguments: int) -> subprocess.Popen[str]:
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--max-restarts", "3"]
            how = ["--nproc-per-node", str(workers), "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
            process = subprocess.Popen(
                [*torchrun, *how, str(script), address, *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            running.callback(process.wait)
            running.callback(process.send_signal, signal.SIGTERM)  # it ends its workers
            return process

        yield start


def said(process: subprocess.Popen[str]) -> str:
    """All that a torchrun says until it ends well."""
    patience = threading.Timer(SECONDS, process.terminate)
    patience.start()
    text, _ = process.communicate()
    patience.cancel()
    assert process.returncode == 0, text
    return text


def test_restarted_workers_begin_a_new_training_in_the_agents_store(torchrun):
    """The Store of the agent still has the record of the workers that were ended: nobody waits for them."""
    text = said(torchrun(3, "", 2, STEPS, 1))
    assert len(re.findall(r"entered attempt=1 step=0 joining=False generation=1", text)) == 3
    assert text.count("ended attempt=1 of 3") == 3


@pytest.mark.few(0)
def test_workers_that_are_restarted_on_one_machine_join_those_of_another(torchrun):
    """One torchrun a machine, at a meeting place of its own: only the workers of one are restarted."""
    meeting = [sys.executable, "-m", "communicators.elastic", "--port", "0"]
    with subprocess.Popen(meeting, stdout=subprocess.PIPE, text=True) as place:
        try:
            address = f"localhost:{re.search(r'port ([0-9]+)', place.stdout.readline())[1]}"
            first, second = torchrun(2, address, 1, 3 * STEPS, 1), torchrun(1, address, 1, 3 * STEPS, 0)
            dying, living = said(first), said(second)
        finally:
            place.kill()
    joined = re.findall(r"entered attempt=1 step=(\d+) joining=True", dying)
    assert len(joined) == 2
    assert all(int(step) >= 20 for step in joined)
    assert dying.count("ended attempt=1 of 3") == 2
    assert "ended attempt=0 of 3" in living
