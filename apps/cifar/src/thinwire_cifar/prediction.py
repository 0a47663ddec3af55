"""What a step's exchange would take on another network: the same schedules in a simulated world."""

import statistics

import torch
from communicators import Communicator, Link, SimulatedWorld, allreduce, barrier
from sparse_collectives import sparse_allreduce
from sparse_compress import ErrorFeedback, TopK
from thinwire_trainer.launching.device import clock_of

REPEATS = 15


def exchange_seconds(algorithm: str, *, numel: int, density: float, size: int, link: Link) -> float:
    """Predicted seconds of one gradient exchange: every message charged α + β·bytes."""

    def exchange(comm: Communicator, gradient: torch.Tensor) -> None:
        if algorithm == "dense":
            allreduce(gradient, comm, native=False)
        else:
            select = TopK(density)
            sparse_allreduce(select(gradient), comm, k=select.entries(numel), algorithm=algorithm)

    world = SimulatedWorld(size, link=link)
    world.run(lambda comm: exchange(comm, torch.randn(numel, generator=torch.Generator().manual_seed(comm.rank))))
    return world.elapsed


def selection_seconds(comm: Communicator, device: torch.device, *, numel: int, density: float) -> float:
    """Measured seconds (the median) that a rank takes to select what it sends, while all others do the same."""
    feedback, clock = ErrorFeedback(TopK(density), momentum=0.9), clock_of(device)
    gradient = torch.randn(numel, device=device)
    times = []
    for _ in range(REPEATS):
        barrier(comm)
        began = clock()
        feedback.compress("gradient", gradient)
        times.append(clock() - began)
    return statistics.median(times)
