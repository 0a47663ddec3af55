"""Trains the DDP example on real ranks with several algorithms and seeds; rank 0 writes the accuracies.

usage, on every rank: python digits_on_ranks.py REPORT.json ALGORITHM ...
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import torch
import torch.distributed as dist

EXAMPLE = Path(__file__).parent.parent / "examples" / "ddp_digits.py"
SEEDS = (0, 1, 2)

if __name__ == "__main__":
    report, *algorithms = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train = runpy.run_path(str(EXAMPLE))["train"]
    accuracies = {name: [train(name, seed) for seed in SEEDS] for name in algorithms}
    if dist.get_rank() == 0:
        Path(report).write_text(json.dumps(accuracies))
    dist.destroy_process_group()
