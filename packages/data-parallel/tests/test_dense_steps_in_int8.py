"""Dense steps of a selection, as in a warm-up, on a wire of int8: fewer bytes, and nothing is lost."""

import pytest
import torch
from communicators import CollectiveError, SimulatedWorld
from data_parallel import DistributedOptimizer, UpdateOptimizer
from hypothesis import given
from hypothesis import strategies as st
from sparse_compress import WarmUp

pytestmark = pytest.mark.quick

NUMEL = 3000


def steps_of(size, wire, gradients, *, density=1.0, algorithm="gtopk", **settings):
    """(parameters after all steps, bytes, state) of each rank; gradients(rank, step)."""

    def on_rank(comm):
        model = torch.nn.ParameterList([torch.zeros(NUMEL)])
        sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        given = {"algorithm": algorithm, "wire": wire, "density": density}
        optimizer = DistributedOptimizer(sgd, model.named_parameters(), comm=comm, **given, **settings)
        sent = comm.bytes_sent
        for step in range(3):
            model[0].grad = gradients(comm.rank, step)
            optimizer.step()
        return model[0].detach().clone(), comm.bytes_sent - sent, optimizer.state_dict()

    return SimulatedWorld(size).run(on_rank)


def drawn(rank, step):
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(10 * rank + step))


def waiting(state):
    """The residual of a rank's state."""
    return torch.cat([tensor.flatten().double() for tensor in _tensors(state, "residual")])


def _tensors(node, name, under=False):
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _tensors(value, name, under or name in str(key))
    elif isinstance(node, list | tuple):
        for value in node:
            yield from _tensors(value, name, under)
    elif isinstance(node, torch.Tensor) and under and node.numel() == NUMEL:
        yield node


@pytest.mark.few(13)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("algorithm", ["gtopk", "spardl", "topk-allgather"])
@pytest.mark.parametrize("wire", ["int8", "int8-packed"])
def test_what_was_applied_and_what_waits_are_the_gradients(size, algorithm, wire):
    found = steps_of(size, wire, drawn, algorithm=algorithm)
    assert all(torch.equal(parameters, found[0][0]) for parameters, *_ in found)
    given_up = sum(drawn(rank, step).double() for rank in range(size) for step in range(3))
    waits = sum(waiting(state) for *_, state in found)
    assert torch.allclose(-size * found[0][0].double() + waits, given_up, atol=1e-4)
    if size > 1:
        assert waits.abs().max() > 0


@pytest.mark.parametrize("size", [2, 4])
def test_a_quarter_of_the_bytes(size):
    whole = steps_of(size, "fp32", drawn)[0][1]
    assert steps_of(size, "int8-packed", drawn)[0][1] < 0.3 * whole


@given(st.integers(1, 5), st.integers(0, 2))
def test_a_step_with_nan_is_skipped_and_leaves_no_nan_to_wait(size, at):
    def gradients(rank, step):
        spoilt = drawn(rank, step)
        spoilt[7] = torch.nan if step == at and rank == 0 else 0.0
        return spoilt

    for parameters, _, state in steps_of(size, "int8-packed", gradients, nonfinite="skip"):
        assert bool(parameters.isfinite().all())
        assert bool(waiting(state).isfinite().all())


def test_a_nan_is_told_with_its_rank():
    def gradients(rank, step):
        return drawn(rank, step) if rank != 1 else torch.full((NUMEL,), torch.nan)

    with pytest.raises(CollectiveError, match="1"):
        steps_of(3, "int8-packed", gradients)


def test_after_the_warm_up_the_selection_goes_on_with_what_was_rounded_off():
    """One warm-up step, then 1 %: updates of all, nothing lost on the way."""

    def on_rank(comm):
        model = torch.nn.ParameterList([torch.zeros(NUMEL)])
        sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        settings = {"density": WarmUp(0.01, steps=1, stages=(1.0,)), "wire": "int8-packed"}
        optimizer = UpdateOptimizer(sgd, model.named_parameters(), comm=comm, **settings)
        for step in range(3):
            with optimizer.ahead():
                model[0].grad = drawn(comm.rank, step)
            optimizer.step()
        return model[0].detach().double(), waiting(optimizer.state_dict())

    found = SimulatedWorld(3).run(on_rank)
    moved = -sum(drawn(rank, step).double() for rank in range(3) for step in range(3))
    assert torch.allclose(3 * found[0][0] + sum(waits for _, waits in found), moved, atol=1e-4)
