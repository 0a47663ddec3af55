"""One rank of `python -m bench elastic`, ours or torchft's: sleeps, exchanges, says so, and comes again when left out.

    python -m bench.elastic_ranks '{"way": …, "meeting": …, "folder": …, "place": …, "ranks": …, "timeout": …}'

It runs under any Python that has the packages of its way; torchft's has no other.
"""

import importlib
import json
import os
import socket
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch

STEP_SECONDS = 0.25
EVERY = 8
"""Steps between two boundaries; gradients have one at every step."""
MODELS = 100  # numbers in and out

Step = Callable[[], int | None]
"""Takes a step; returns the number of the boundary that it has come to, where parameters are alike, or None."""


def main(text: str) -> None:
    """Trains until it is ended."""
    asked = json.loads(text)
    with (Path(asked["folder"]) / f"{os.getpid()}.jsonl").open("a") as file:
        journal = Journal(file, asked["place"])
        (_torchft if asked["way"] == "torchft" else _thinwire)(asked, journal)


class Journal:
    """Steps of this rank, one line each. began: when it came, its imports done, or was told that it is out."""

    def __init__(self, file: Any, place: int) -> None:
        self._file, self._place, self.began = file, place, time.time()

    def train(self, model: Any, step: Step, size: Callable[[], int], *, every: int, heals: bool = False) -> None:
        """Takes steps without end. every: steps that a boundary keeps. heals: a newcomer counts from there on."""
        generator, news = torch.Generator().manual_seed(os.getpid()), True
        while True:
            time.sleep(STEP_SECONDS)
            model(torch.randn(4, MODELS, generator=generator)).square().mean().backward()
            boundary, now = step(), time.time()
            line = {"at": now, "pid": os.getpid(), "place": self._place, "size": size(), "kept": 0}
            if boundary is not None:
                line |= {"boundary": boundary, "digest": _digest(model), "kept": every}
            if news and (boundary is not None or not heals):
                news, line["joined"] = False, now - self.began
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()


def _digest(model: Any) -> int:
    return zlib.crc32(torch.cat([p.detach().flatten() for p in model.parameters()]).numpy().tobytes())


def _thinwire(asked: dict[str, Any], journal: Journal) -> None:
    from communicators import CollectiveError, Elastic, LeftOutError

    package, way = WAYS[asked["way"]]
    importlib.import_module(package)
    journal.began = time.time()
    told = CollectiveError if way is _eager else LeftOutError  # it may have been taken for dead amid the rounds
    while True:
        model = torch.nn.Linear(MODELS, MODELS)
        world = Elastic(asked["meeting"], at_least=2, start_with=asked["ranks"], timeout=asked["timeout"])
        try:
            with way(model, world) as step:
                journal.train(model, step, lambda: world.size, every=1 if way is _gradients else EVERY)  # noqa: B023
        except told as error:
            print(f"{time.time():.1f} {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            journal.began = time.time()


@contextmanager
def _gradients(model: Any, world: Any) -> Iterator[Step]:
    from data_parallel import DistributedOptimizer

    inner = torch.optim.Adam(model.parameters())
    optimizer = DistributedOptimizer(inner, model.named_parameters(), comm=world, algorithm="dense")
    yield partial(_step, optimizer, lambda: None, lambda: optimizer.stats()["steps"])


@contextmanager
def _diloco(model: Any, world: Any) -> Iterator[Step]:
    from local_sgd import DiLoCo

    optimizer = DiLoCo(torch.optim.AdamW(model.parameters()), model=model, sync_every=EVERY, comm=world)
    yield partial(_step, optimizer, optimizer.average, lambda: optimizer.stats()["boundaries"])


@contextmanager
def _eager(model: Any, world: Any) -> Iterator[Step]:
    from partial_collectives import EagerSGD

    taken = met = 0
    with EagerSGD(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters(), comm=world) as optimizer:

        def meet() -> None:
            nonlocal taken, met
            taken += 1
            if taken % EVERY == 0:
                optimizer.synchronize()
                met = optimizer.applied

        yield partial(_step, optimizer, meet, lambda: met)


def _step(optimizer: Any, share: Callable[[], object], boundaries: Callable[[], float]) -> int | None:
    before = boundaries()
    optimizer.step()
    share()
    optimizer.zero_grad()
    now = boundaries()
    return int(now) if now != before else None


WAYS = {
    "gradients": ("data_parallel", _gradients),
    "diloco": ("local_sgd", _diloco),
    "eager": ("partial_collectives", _eager),
}


def _torchft(asked: dict[str, Any], journal: Journal) -> None:
    """DiLoCo as torchft's examples/diloco/train_diloco.py has it: a quorum at each boundary, a replica a process."""
    own = asked["address"]
    socket.gethostname = lambda: own  # where it serves its state; all namespaces have the machine's name
    from torch._C._distributed_c10d import TCPStore
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo

    journal.began = time.time()
    model = torch.nn.Linear(MODELS, MODELS)
    inner = torch.optim.AdamW(model.parameters())
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    store = TCPStore(own, 0, is_master=True, wait_for_workers=False)

    def load(state: Any) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["inner"])
        outer.load_state_dict(state["outer"])

    limits = {"timeout": timedelta(seconds=asked["timeout"]), "connect_timeout": timedelta(seconds=asked["timeout"])}
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=asked["timeout"])),
        load_state_dict=load,
        state_dict=lambda: {
            "model": model.state_dict(),
            "inner": inner.state_dict(),
            "outer": outer.state_dict(),
        },
        min_replica_size=2,
        use_async_quorum=False,
        replica_id=f"place_{asked['place']}",
        rank=0,
        world_size=1,
        store_addr=own,
        store_port=store.port,
        lighthouse_addr=f"http://{asked['meeting']}",
        hostname=own,
        **limits,
    )

    step = partial(_step, inner, lambda: None, manager.current_step)
    with DiLoCo(manager, [model], inner, outer, sync_every=EVERY, pin_memory=False):
        journal.train(model, step, manager.num_participants, every=EVERY, heals=True)


if __name__ == "__main__":
    main(sys.argv[1])
