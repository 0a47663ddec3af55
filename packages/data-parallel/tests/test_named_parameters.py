"""named_parameters covers exactly what the optimizer trains."""

import pytest
import torch
from data_parallel import DistributedOptimizer
from torch import nn

pytestmark = pytest.mark.quick


def wrap(parameters, named):
    return DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), named)


@pytest.fixture
def model():
    return nn.Linear(3, 2)


def test_a_parameter_without_a_name(model):
    with pytest.raises(ValueError, match=r"without a name \(group, shape\): \[\(0, \(2,\)\)\]"):
        wrap(model.parameters(), [("weight", model.weight)])


def test_a_trainable_parameter_that_the_optimizer_lacks(model):
    with pytest.raises(ValueError, match=r"the optimizer does not have: \['bias'\]"):
        wrap([model.weight], model.named_parameters())


def test_a_frozen_one_may_be_left_out_of_the_optimizer(model):
    model.bias.requires_grad_(False)
    wrap([model.weight], model.named_parameters())


def test_two_parameters_of_one_name(model):
    with pytest.raises(ValueError, match=r"duplicate names in named_parameters: \['p'\]"):
        wrap(model.parameters(), [("p", model.weight), ("p", model.bias)])


def test_one_parameter_of_two_names(model):
    with pytest.raises(ValueError, match=r"under several names: \['w', 'v'\]"):
        wrap([model.weight], [("w", model.weight), ("v", model.weight)])


def test_parameters_instead_of_named_parameters(model):
    with pytest.raises(TypeError, match=r"pass model\.named_parameters\(\), not model\.parameters\(\)"):
        wrap(model.parameters(), model.parameters())


def test_complex_parameters():
    p = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(TypeError, match=r"cannot be averaged: \['z \(torch.complex64\)'\]"):
        wrap([p], [("z", p)])


def test_parameters_without_values():
    model = nn.Linear(3, 2, device="meta")
    with pytest.raises(ValueError, match=r"on the meta device, which have no values: \['weight', 'bias'\]; to_empty"):
        wrap(model.parameters(), model.named_parameters())
