"""Ranks that come and go: DiLoCo on scikit-learn's handwritten digits, where one rank is killed and another one joins.

    python examples/elastic_digits.py

Without an address it starts the meeting place and three ranks, kills one amid the training, and starts a fourth. A rank
by itself, on any machine that reaches the address: `python examples/elastic_digits.py HOST:PORT`.
"""

import logging
import os
import re
import subprocess
import sys
import time
from functools import partial

import torch
from communicators import Elastic
from ddp_digits import digits
from local_sgd import DiLoCo
from torch import nn

EPOCHS, BATCH, TAU, PAUSE = 30, 48, 5, 0.02


def rank(address: str) -> None:
    """Trains as one of the ranks that are there."""
    train_set, test_set = digits()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    world = Elastic(address, at_least=2, start_with=3, timeout=10)  # line 1
    inner = torch.optim.AdamW(model.parameters(), lr=2e-3)
    optimizer = DiLoCo(inner, model=model, sync_every=TAU, comm=world)  # line 2
    print("trains", flush=True)
    for images, labels in world.deal(train_set, batch_size=BATCH, epochs=EPOCHS):  # line 3
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.average()
        time.sleep(PAUSE)  # a larger model
    optimizer.finish()
    images, labels = test_set.tensors
    accuracy = float((model(images).argmax(dim=1) == labels).float().mean())
    if world.rank == 0:
        print(f"{world.size} ranks at the end, generation {world.generation}: test accuracy {accuracy:.1%}", flush=True)


def demo() -> None:
    """Starts ranks, kills one, starts another."""
    server = subprocess.Popen([sys.executable, "-m", "communicators.elastic", "--port", "0"], stdout=subprocess.PIPE)
    address = f"localhost:{re.search(rb'port ([0-9]+)', server.stdout.readline())[1].decode()}"
    start = partial(subprocess.Popen, [sys.executable, __file__, address], stdout=subprocess.PIPE, text=True)
    try:
        ranks = [start() for _ in range(3)]
        for one in ranks:
            one.stdout.readline()  # it trains
        time.sleep(2)
        print(f"kill -9 {ranks[1].pid}", flush=True)
        ranks[1].kill()
        ranks.append(start())
        told = "".join(one.communicate(timeout=200)[0] for one in ranks).replace("trains\n", "")
        print(f"another one was started; {told}exit statuses {[one.returncode for one in ranks]}")
    finally:
        for one in [server, *ranks]:
            one.kill()


if __name__ == "__main__":
    logging.basicConfig(format=f"rank {os.getpid()}: %(message)s")
    rank(sys.argv[1]) if len(sys.argv) > 1 else demo()
