"""UpdateOptimizer: gradients and updates that are not finite, and what is left behind."""

import copy

import pytest
import torch
from communicators import CollectiveError, SimulatedWorld
from data_parallel import DistributedOptimizer, UpdateOptimizer
from sparse_collectives import ALGORITHMS
from sparse_compress import RandomK
from torch import nn

SPARSE = [name for name, entry in ALGORITHMS.items() if entry.selects]
SHAPES = {"a": (3, 4), "b": (5,), "c": (1,), "d": (2, 3)}
OPTIMIZERS = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
}
SGD = {"sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01)}


def made(comm, optimizer, *, kind=UpdateOptimizer, **options):
    torch.manual_seed(0)
    model = nn.ParameterDict({name: nn.Parameter(torch.randn(shape)) for name, shape in SHAPES.items()})
    inner = {**OPTIMIZERS, **SGD}[optimizer](model.parameters())
    options = {"density": 0.1, **options}
    return model, inner, kind(inner, model.named_parameters(), comm=comm, **options)


def give(model, comm, step):
    generator = torch.Generator().manual_seed(1000 * step + comm.rank)
    for p in model.values():
        p.grad = torch.randn(p.shape, generator=generator) + p.detach()


def spoil(how, model, inner):
    if how == "gradient":
        model["a"].grad.fill_(torch.nan)
    elif how == "overflow":
        model["a"].grad.fill_(1e38)
        inner.param_groups[0]["lr"] = 1e3
    else:
        inner.param_groups[0]["lr"] = float(how)


def everything(model, optimizer):
    state = copy.deepcopy(optimizer.state_dict())
    kept = [value for entry in state["state"].values() for _, value in sorted(entry.items())]
    tensors = [*(p.detach() for p in model.values()), *state["distributed"]["residuals"].values(), *kept]
    return torch.cat([tensor.reshape(-1).float() for tensor in tensors if tensor is not None])


def train(comm, steps, optimizer, how, **options):
    """Step 2 is the bad one, on rank 1."""
    model, inner, wrapper = made(comm, optimizer, nonfinite="skip", **options)
    for step in steps:
        with wrapper.ahead():
            give(model, comm, step)
        if step == 2 and comm.rank == 1:
            spoil(how, model, inner)
        wrapper.step()
        inner.param_groups[0]["lr"] = 0.01
    return everything(model, wrapper), wrapper.skipped


@pytest.mark.few(8)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("how", ["gradient", "overflow", "nan", "inf"])
@pytest.mark.parametrize("options", [{}, {"dense_below": 6}, {"bucket_bytes": 24}, {"algorithm": "oktopk"}], ids=str)
def test_a_skipped_step_leaves_no_trace_whatever_was_not_finite(optimizer, how, options):
    if how == "overflow" and optimizer == "adam":
        how = "nan"  # Adam divides a large gradient by its size
    bad = SimulatedWorld(3).run(lambda comm: train(comm, [0, 1, 2, 3, 4], optimizer, how, **options))
    good = SimulatedWorld(3).run(lambda comm: train(comm, [0, 1, 3, 4], optimizer, how, **options))
    for (one, skipped), (other, none) in zip(bad, good, strict=True):
        assert (skipped, none) == (1, 0)
        assert torch.equal(one, other)


def test_a_first_step_that_is_skipped_leaves_no_moments():
    def body(comm):
        model, inner, optimizer = made(comm, "adam", nonfinite="skip")
        give(model, comm, 0)
        inner.param_groups[0]["lr"] = float("nan")
        with optimizer.ahead():
            pass
        optimizer.step()
        return optimizer.skipped, len(inner.state)

    assert SimulatedWorld(2).run(body) == [(1, 0)] * 2


def test_updates_whose_sum_overflows_are_skipped_too():
    def body(comm):
        model, inner, optimizer = made(comm, "momentum", nonfinite="skip", density=1.0)
        before = [p.detach().clone() for p in model.values()]
        for p in model.values():
            p.grad = torch.full_like(p, 3e38)
        inner.param_groups[0]["lr"] = 1.0
        optimizer.step()
        own = optimizer.state_dict()["distributed"]["residuals"]
        assert not any(residual.any() for residual in own.values())
        assert all(torch.equal(p, old) for p, old in zip(model.values(), before, strict=True))
        assert not inner.state
        return optimizer.skipped

    assert SimulatedWorld(3).run(body) == [1] * 3


@pytest.mark.few(13)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("how", ["gradient", "nan", "inf"])
@pytest.mark.parametrize("name", SPARSE)
def test_after_the_error_no_nan_stays_and_training_goes_on(optimizer, how, name):
    def body(comm):
        model, inner, wrapper = made(comm, optimizer, algorithm=name)
        for step in range(5):
            with wrapper.ahead():
                give(model, comm, step)
            if step != 2:
                wrapper.step()
                continue
            if comm.rank == 1:
                spoil(how, model, inner)
            before = [p.detach().clone() for p in model.values()]
            with pytest.raises(CollectiveError, match="rank 1: the update of 'a' is not finite") as error:
                wrapper.step()
            assert all(torch.equal(p, old) for p, old in zip(model.values(), before, strict=True))
            assert everything(model, wrapper).isfinite().all()
            inner.param_groups[0]["lr"] = 0.01
        assert everything(model, wrapper).isfinite().all()
        return str(error.value)

    assert len(set(SimulatedWorld(3).run(body))) == 1


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize(
    "options", [{}, {"momentum": 0.5}, {"momentum": 0.5, "dense_below": 6}, {"random": True}], ids=str
)
def test_gradients_that_are_sent_leave_no_nan_either(name, options):
    options = dict(options)
    if options.pop("random", False) and name == "gtopk":
        options = {"compressor": RandomK(0.1, seed=1), "density": None}

    def body(comm):
        model, _, optimizer = made(comm, "sgd", algorithm=name, kind=DistributedOptimizer, **options)
        for step in range(4):
            give(model, comm, step)
            if step != 1:
                optimizer.step()
                continue
            if comm.rank == 1:
                for p in model.values():
                    p.grad.fill_(torch.nan)
            with pytest.raises(CollectiveError, match="rank 1: the gradient of 'a' is not finite"):
                optimizer.step()
        own = optimizer.state_dict()["distributed"]
        assert all(tensor.isfinite().all() for memory in ("residuals", "velocities") for tensor in own[memory].values())

    SimulatedWorld(2).run(body)


@pytest.mark.parametrize("kind", [UpdateOptimizer, DistributedOptimizer])
def test_residuals_that_are_not_finite_are_not_loaded(kind):
    def body(comm):
        model, _, optimizer = made(comm, "momentum", kind=kind)
        optimizer.step(lambda: give(model, comm, 0))
        state = copy.deepcopy(optimizer.state_dict())
        before = everything(model, optimizer)
        state["distributed"]["residuals"]["d"][1, 1] = torch.nan
        with pytest.raises(ValueError, match=r"residuals of 'd'.*not finite"):
            optimizer.load_state_dict(state)
        assert torch.equal(everything(model, optimizer), before)

    SimulatedWorld(1).run(body)
