"""What several test files train: a noisy quadratic, whose gradients every rank draws for itself."""

import io

import local_sgd
import pytest
import torch
from torch import nn

SHAPES = {"a": (2, 3), "b": (4,), "c": ()}


class Quadratic:
    """Parameters of one rank, and gradients x − target + noise; the noise depends on rank and step alone."""

    def __init__(self, rank, *, dtype=torch.float32, spread=1.0):
        begin = torch.Generator().manual_seed(99)
        self.model = nn.ParameterDict(
            {key: nn.Parameter(torch.randn(shape, generator=begin).to(dtype)) for key, shape in SHAPES.items()}
        )
        self.rank, self.dtype, self.spread = rank, dtype, spread

    def backward(self, step):
        generator = torch.Generator().manual_seed(1000 * step + self.rank)
        for p in self.model.values():
            noise = torch.randn(p.shape, generator=generator).to(self.dtype)
            p.grad = p.detach() - self.rank * self.spread + noise

    def flat(self):
        return torch.cat([p.detach().reshape(-1) for p in self.model.values()])

    def train(self, optimizer, steps):
        """Returns x after every step."""
        for step in steps:
            self.backward(step)
            optimizer.step()
            optimizer.zero_grad()
            optimizer.average()
        return self.flat().clone()


@pytest.fixture(scope="session")
def quadratic():
    """The class."""
    return Quadratic


@pytest.fixture(params=[algorithm.__name__ for algorithm in local_sgd.ALGORITHMS.values()])
def algorithm(request):
    """Every class of the family."""
    return getattr(local_sgd, request.param)


@pytest.fixture(scope="session")
def saved():
    """saved(state): through a file, as tensors and plain values only."""

    def through_a_file(state):
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        return torch.load(file, weights_only=True)

    return through_a_file
