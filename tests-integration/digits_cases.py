"""The DDP example learns, whatever the algorithm; how well: `bench convergence`."""

from __future__ import annotations

import runpy
from pathlib import Path

from sparse_collectives import ALGORITHMS

EXAMPLE = Path(__file__).parent.parent / "examples" / "ddp_digits.py"


def the_example_learns():
    train = runpy.run_path(str(EXAMPLE))["train"]
    algorithms = ["none", *(name for name, entry in ALGORITHMS.items() if entry.selects)]
    reached = {name: train(name, epochs=3) for name in algorithms}
    assert min(reached.values()) > 0.9, reached


LAWS = [the_example_learns]
