"""What several test files train."""

import copy

import pytest
import torch
from data_parallel import DistributedOptimizer
from sparse_compress import TopK
from torch import nn


@pytest.fixture
def train():
    """train(comm, steps, saved=None, **options of the optimizer) -> (model's state, optimizer's state)."""

    def training(comm, steps, saved=None, **options):
        model = nn.ParameterDict({"a": nn.Parameter(torch.zeros(7)), "b": nn.Parameter(torch.zeros(20, 3))})
        inner = torch.optim.SGD(model.parameters(), lr=0.5)
        optimizer = DistributedOptimizer(inner, model.named_parameters(), comm=comm, compressor=TopK(0.1), **options)
        if saved is not None:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        for step in steps:
            generator = torch.Generator().manual_seed(10 * step + comm.rank)
            for p in model.values():
                p.grad = torch.randn(p.shape, generator=generator)
            optimizer.step()
        return copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    return training
