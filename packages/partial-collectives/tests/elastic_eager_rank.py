"""One rank of `test_elastic_processes.py`: trains eagerly, a line a meeting, until it is ended.

python elastic_eager_rank.py ADDRESS TIMEOUT
"""

from __future__ import annotations

import os
import sys
import time

import torch
from communicators import Elastic, LeftOutError
from partial_collectives import EagerSGD


def main() -> None:
    world = Elastic(sys.argv[1], at_least=2, start_with=3, timeout=float(sys.argv[2]), patience=60.0)
    torch.manual_seed(world.rank)
    model = torch.nn.Linear(10, 1)
    optimizer = EagerSGD(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters(), comm=world)
    for step in range(1_000_000):
        time.sleep(0.05)
        model(torch.randn(4, 10)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 4:
            optimizer.synchronize()
            print("met", optimizer.applied, world.size, model.weight.double().sum().item(), flush=True)


if __name__ == "__main__":
    try:
        main()
    except LeftOutError as error:
        print("LeftOutError", error, flush=True)
        os._exit(3)
