"""Across a whole run: Σ of all gradients = P · Σ of the applied means + Σ of the residuals, exactly."""

import pytest
import torch
from communicators import SimulatedWorld
from data_parallel import DistributedOptimizer
from devices import CPU, every_other_device
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_collectives import ALGORITHMS, WIRES, ARCTopK
from sparse_compress import TopK
from torch import nn

pytestmark = pytest.mark.quick

SHAPES = {"a": (3, 4), "b": (5,), "c": (1,), "d": (2, 3)}
ENTRIES = {**ALGORITHMS, "arc-topk": ARCTopK(width=2)}


def run(comm, *, steps, generator, missing=(), skipped=(), backwards=1, device=CPU, **options):
    """Trains with integer gradients at lr 1 from zero; (Σ own gradients, −P·parameters, own residuals), flat."""
    model = nn.ParameterDict({name: nn.Parameter(torch.zeros(shape, device=device)) for name, shape in SHAPES.items()})
    optimizer = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), comm=comm, nonfinite="skip", **options
    )
    given = {name: torch.zeros_like(p) for name, p in model.items()}
    for step in range(steps):
        optimizer.zero_grad()
        for _ in range(backwards):
            loss = []
            for name, p in model.items():
                if (comm.rank, name) not in missing:
                    gradient = torch.randint(-9, 10, p.shape, generator=generator).float().to(device)
                    loss.append((p * gradient).sum())
                    given[name] += gradient if step not in skipped else 0
            if loss:
                sum(loss).backward()
        if step in skipped and comm.rank == 0:
            model["b"].grad = torch.full_like(model["b"], torch.inf)
        optimizer.step()
    residuals = optimizer.state_dict()["distributed"]["residuals"]
    flat = [
        torch.cat([tensors[name].detach().cpu().view(-1) for name in SHAPES])
        for tensors in (given, model, residuals or given)
    ]
    return flat[0], -comm.size * flat[1], flat[2] if residuals else torch.zeros_like(flat[0])


def check(size, seed=0, **options):
    def body(comm):
        return run(comm, generator=torch.Generator().manual_seed(100 * seed + comm.rank), **options)

    results = SimulatedWorld(size).run(body)
    given, residuals = (sum(result[i] for result in results) for i in (0, 2))
    for _, applied, _ in results:
        assert torch.equal(given, applied + residuals)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ENTRIES)
@settings(max_examples=settings.default.max_examples // 2)
@given(
    size=st.sampled_from([1, 2, 4, 8]),  # so that total / P is exact
    seed=st.integers(0, 99),
    steps=st.integers(1, 6),
    density=st.sampled_from([0.01, 0.2, 1.0]),
    bucket_bytes=st.sampled_from([None, 1, 24, 60]),
    backwards=st.integers(1, 2),
    missing=st.sets(st.tuples(st.integers(0, 7), st.sampled_from(list(SHAPES)))),
    skipped=st.sets(st.integers(0, 5)),
    wire=st.sampled_from(list(WIRES)),
)
def test_nothing_is_lost(name, density, wire, **options):
    wire = wire if ENTRIES[name].takes_wire else "fp32"
    check(algorithm=ENTRIES[name], compressor=TopK(density), wire=wire, **options)


@pytest.mark.few(6)
@every_other_device
@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("options", [{}, {"overlap": True, "bucket_bytes": 24}, {"wire": "bf16"}], ids=str)
def test_nothing_is_lost_on_a_device(name, device, options):
    if not ALGORITHMS[name].selects:
        options = {option: value for option, value in options.items() if option != "wire"}
    skipped = set() if "overlap" in options else {1}  # there the exchange has begun before a gradient is made inf
    check(2, algorithm=name, compressor=TopK(0.2), steps=3, skipped=skipped, device=device, **options)
