"""What `bench.real_ranks` promises of the ranks that a benchmark starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from old_torch import since_2_7

SCRIPT = """
import os
import torch
import torch.distributed as dist
from bench.real_ranks import process_group


def threads():
    names = (open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task"))
    return sum("gloo" in name for name in names)


def trained():
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
    ddp(torch.ones(2, 3)).sum().backward()
    assert threads()


with process_group(store=dist.HashStore(), rank=0, world_size=1):
    trained()
assert not threads(), "one that is there still when Python ends may end the process by SIGABRT"
"""


@since_2_7("gives gloo's threads no names")
def test_no_thread_of_gloos_outlives_the_group():
    """In a process of its own, which has imported no more of torch than the script does."""
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=root, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
