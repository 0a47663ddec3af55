"""Draws docs/algorithms/pictures: every algorithm among four simulated ranks.

python -m website.pictures writes them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from communicators import Communicator, Link
from data_parallel import DistributedOptimizer
from local_sgd import ALGORITHMS as PERIODIC
from partial_collectives import PartialAllreduce
from sparse_collectives import ALGORITHMS, Algorithm, ARCTopK, SparDL, sparse_allreduce, sparse_allreduce_array
from sparse_compress import topk

from website.drawing import drawn, short
from website.recording import Recording, record

FOLDER = Path(__file__).parent.parent / "docs" / "algorithms" / "pictures"
LINK = Link(alpha=50e-6, beta=8e-9)
NUMEL, K, RANKS = 100_000, 1_000, 4
STEP = 0.5e-3  # virtual seconds
NETWORK = "1 Gbit/s, 50 µs a message"

OVERLAPPED = ("easgd", "cocod", "overlap-local-sgd")
"""Their exchanges go on during the next steps, of which a picture shows more then."""


def pictures() -> dict[str, Callable[[], str]]:
    """What draws each, by the name of its file."""
    return {
        **{name: partial(sparse, entry) for name, entry in ALGORITHMS.items()},
        "spardl-teams": partial(sparse, SparDL(teams=2), ", two teams"),
        "arc-topk": partial(sparse, ARCTopK()),
        **{name: partial(whole, name) for name in ("powersgd", "dense-int8")},
        **{name: partial(periodic, name) for name in PERIODIC},
        "muloco": partial(periodic, "diloco", "MuLoCo in 2 bits", compress="int2"),
        **{name: partial(partially, name, quorum) for name, quorum in QUORUMS.items()},
    }


QUORUMS: dict[str, str | int] = {"solo": "solo", "majority": "majority", "quorum": 3}


def gradient(rank: int, numel: int = NUMEL) -> torch.Tensor:
    """Integers that look random, the same ones with every torch."""
    index = torch.arange(numel, dtype=torch.int64)
    return ((index * 48_271 + (rank + 1) * 40_692_779) % 65_537 - 32_768).float()


def sparse(entry: Algorithm, more: str = "") -> str:
    """One call of a sparse allreduce. more: of its title."""

    def body(comm: Communicator, recording: Recording) -> None:
        if not entry.selects:
            sparse_allreduce_array(gradient(comm.rank), comm, algorithm=entry)
            return
        state = entry.initial_state()
        for _ in range(2 if state else 1):  # the first call settles what is kept
            recording.from_here(comm)
            chosen = topk(gradient(comm.rank), K if entry.cuts else NUMEL)
            sparse_allreduce(chosen, comm, k=K, algorithm=entry, state=state)

    recording = record(body, link=LINK)
    title = f"{entry.name}{more}: {RANKS} ranks, n = {NUMEL:,}"
    title += f", k = {K:,}" if entry.selects else ""
    return drawn(recording, title, f"{NETWORK}: {sums(recording)}")


def whole(name: str) -> str:
    """One step of an optimizer whose scheme sends something of every element."""

    def body(comm: Communicator, recording: Recording) -> None:
        model = torch.nn.Linear(400, 250, bias=False)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        options = {"dense_steps": 0} if name == "powersgd" else None
        optimizer = DistributedOptimizer(inner, model.named_parameters(), comm=comm, algorithm=name, options=options)
        for _ in range(2):  # in the first step ranks agree on what they do
            model.weight.grad = gradient(comm.rank).view_as(model.weight)
            recording.from_here(comm)
            optimizer.step()

    recording = record(body, link=LINK)
    title = f"{name}: {RANKS} ranks, a matrix of 250 × 400" + (", rank 2" if name == "powersgd" else "")
    return drawn(recording, title, f"{NETWORK}: {sums(recording)}")


def periodic(name: str, called: str = "", **settings: Any) -> str:
    """Eight steps of periodic averaging. called: the title, instead of the class's name."""
    every = 1 if name == "demo" else 2 if name in OVERLAPPED else 4
    settings |= {"fragments": 2, "delay": 1} if name == "streaming-diloco" else {}

    def body(comm: Communicator, recording: Recording) -> None:
        layers = [torch.nn.Linear(60, 60, bias=False) for _ in range(2)]
        model = torch.nn.Sequential(*layers)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = PERIODIC[name](inner, comm=comm, model=model, sync_every=every, **settings)
        recording.from_here(comm)
        for step in range(8):
            recording.compute(comm, STEP * (1 + 0.1 * ((step + comm.rank) % 3)))
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            optimizer.average()
        optimizer.finish()

    recording = record(body, link=LINK)
    title = f"{called or PERIODIC[name].__name__}: {RANKS} ranks, 8 steps, τ = {every}"
    return drawn(recording, title, f"7,200 parameters, {NETWORK}: {sums(recording)}. The end: finish().")


def partially(name: str, quorum: Any) -> str:
    """Steps of ranks of which one is slow, and the rounds between them."""

    def body(comm: Communicator, recording: Recording) -> None:
        with PartialAllreduce(torch.zeros(20_000), comm, quorum=quorum) as partial:
            recording.from_here(comm)
            for step in range(5 if comm.rank < RANKS - 1 else 2):
                slow = 4.0 if comm.rank == RANKS - 1 else 1 + 0.2 * ((step + comm.rank) % 3)
                recording.compute(comm, 2 * STEP * slow)
                partial.allreduce(torch.ones(20_000))
            for _ in partial.finish():
                pass

    recording = record(body, link=LINK)
    title = f"quorum = {quorum!r}: {RANKS} ranks, rank {RANKS - 1} is slow"
    return drawn(recording, title, f"20,000 elements, {NETWORK}: {sums(recording)}. Signals are not drawn.")


def sums(recording: Recording) -> str:
    """How long it took, and what the busiest rank sent."""
    return f"{recording.seconds * 1e3:.3g} ms, {short(recording.most_bytes)} from the busiest rank"


def main() -> None:
    """Writes all of them."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, draw in pictures().items():
        (FOLDER / f"{name}.svg").write_text(draw())


if __name__ == "__main__":
    main()
