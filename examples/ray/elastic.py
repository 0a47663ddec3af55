"""Ray's tasks as ranks that come and go: DiLoCo on scikit-learn's handwritten digits, where one worker is killed.

    pip install "ray[train]" scikit-learn
    python examples/ray/elastic.py

When a worker of a TorchTrainer dies, all end, and begin anew if its FailureConfig allows failures. Of tasks Ray starts
the one anew, and it joins the others, who have gone on meanwhile. The lines that make it elastic are marked.
"""

import os
import signal
import time

import ray
import torch
from communicators import Elastic
from digits import digits, network
from local_sgd import DiLoCo
from torch import nn
from torch.distributed import TCPStore
from torch.utils.data import TensorDataset

WORKERS, EPOCHS, BATCH, PAUSE = 3, 40, 48, 0.02


@ray.remote(num_cpus=0)
class MeetingPlace:
    """Where ranks find each other; apart from all of them, so that none takes it along. Also notes who has begun."""

    def __init__(self) -> None:
        self.store = TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)  # noqa: S104 - ranks of other machines meet there
        self.begun: list[tuple[int, int]] = []

    def address(self) -> str:
        """HOST:PORT."""
        return f"{ray.util.get_node_ip_address()}:{self.store.port}"

    def begins(self, worker: int, process: int) -> None:
        """A worker says so once it trains."""
        self.begun.append((worker, process))

    def processes(self, worker: int) -> list[int]:
        """Those that were this worker, one after another."""
        return [process for who, process in self.begun if who == worker]


@ray.remote(num_cpus=0.5, max_retries=-1)
def trains(worker: int, place: ray.actor.ActorHandle) -> tuple[float, int, int]:
    """One worker; returns the test accuracy, the number of ranks at the end, and the generation."""
    images, labels = digits()
    model = network()
    world = Elastic(ray.get(place.address.remote()), at_least=2, start_with=WORKERS, timeout=10)  # line 1
    inner = torch.optim.AdamW(model.parameters(), lr=0.002)
    optimizer = DiLoCo(inner, sync_every=5, model=model, comm=world)  # line 2
    train_set = TensorDataset(images[:1437], labels[:1437])
    for number, (batch, classes) in enumerate(world.deal(train_set, batch_size=BATCH, epochs=EPOCHS)):  # line 3
        if number == 0:
            place.begins.remote(worker, os.getpid())
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch), classes).backward()
        optimizer.step()
        optimizer.average()
        time.sleep(PAUSE)  # a larger model
    optimizer.finish()
    accuracy = float((model(images[1437:]).argmax(dim=1) == labels[1437:]).float().mean())
    return accuracy, world.size, world.generation


def main() -> None:
    """Starts the workers, kills one amid the training, and says how often each was started."""
    place = MeetingPlace.remote()
    workers = [trains.remote(worker, place) for worker in range(WORKERS)]
    while not all(ray.get([place.processes.remote(worker) for worker in range(WORKERS)])):
        time.sleep(0.2)
    time.sleep(2)
    [victim] = ray.get(place.processes.remote(1))
    print(f"kill -9 {victim}, worker 1", flush=True)
    os.kill(victim, signal.SIGKILL)
    accuracy, size, generation = ray.get(workers)[0]
    started = [len(ray.get(place.processes.remote(worker))) for worker in range(WORKERS)]
    print(f"elastic: test accuracy {accuracy:.1%} on {size} workers, generation {generation}; started {started} times")


if __name__ == "__main__":
    ray.init()
    main()
