"""One rank of `test_elastic_processes.py`: adds ones in a ledger, a line a step, until it is ended.

python elastic_rank.py ADDRESS AT_LEAST TIMEOUT NUMEL [PATIENCE]
"""

from __future__ import annotations

import os
import sys
import time

import torch
from communicators import Elastic, LeftOutError, allreduce


def main() -> None:
    address, at_least, timeout, numel = sys.argv[1], *map(float, sys.argv[2:5])
    world = Elastic(address, at_least=int(at_least), timeout=timeout, patience=float((sys.argv[5:] or ["60"])[0]))
    ledger, step = torch.zeros(int(numel), dtype=torch.float64), 0
    began = time.time()
    if world.joining:
        state = world.take()
        ledger, step = state["ledger"], state["step"]
    print("entered", world.generation, f"{time.time() - began:.3f}", flush=True)
    while True:
        ones = torch.ones(3, dtype=torch.float64)
        total, size = world.atomic(lambda ones=ones: (allreduce(ones, world), world.size))
        assert total.tolist() == [size] * 3
        ledger[:3] += total
        step += 1
        print("step", step, world.size, world.generation, ledger[0].item(), time.time(), flush=True)
        time.sleep(0.02)
        world.boundary(lambda step=step: {"ledger": ledger, "step": step})


if __name__ == "__main__":
    try:
        main()
    except (LeftOutError, TimeoutError) as error:
        print(type(error).__name__, error, flush=True)
        os._exit(3)
