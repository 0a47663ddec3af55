"""Periodic averaging on real ranks: the bits of the simulated world, uneven ends, wrong calls; run by on_ranks.py."""

from __future__ import annotations

import io
from functools import partial

import torch
from communicators import SimulatedWorld, allgather
from local_sgd import ALGORITHMS, BMUF, DiLoCo, LocalSGD, OverlapLocalSGD, StreamingDiLoCo
from torch import nn

VARIANTS = [
    *ALGORITHMS.values(),
    partial(LocalSGD, compress="int8"),
    partial(StreamingDiLoCo, compress="int2"),
]
STEPS = 11


def begin(comm, algorithm, **options):
    model = nn.ParameterDict({key: nn.Parameter(torch.full((50, 7), float(comm.rank))) for key in "abc"})
    model["d"] = nn.Parameter(torch.ones(9, dtype=torch.bfloat16))
    inner = torch.optim.Adam(model.parameters(), lr=0.1)
    return model, algorithm(inner, comm=comm, model=model, **{"sync_every": 3, "bucket_bytes": 1000, **options})


def train(comm, model, optimizer, steps):
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + comm.rank)
        for p in model.values():
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype) + comm.rank
        optimizer.step()
        optimizer.average()


def flat(model):
    return torch.cat([p.detach().float().reshape(-1) for p in model.values()])


def trained(comm, algorithm):
    """x after some steps with a checkpoint between, the model then, and the end of ranks with different steps."""
    model, optimizer = begin(comm, algorithm)
    train(comm, model, optimizer, range(7))
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    model, optimizer = begin(comm, algorithm)
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    train(comm, model, optimizer, range(7, STEPS))
    results = [flat(model)]
    with optimizer.averaged_model():
        results.append(flat(model))
    train(comm, model, optimizer, range(STEPS, STEPS + 4 * comm.rank))
    optimizer.finish()
    return torch.stack([*results, flat(model)])


def training_has_the_bits_of_the_simulated_world_for_local_sgd(comm):
    for turn, algorithm in enumerate(VARIANTS):
        own = trained(comm, algorithm)
        found = [one.view(own.shape) for one in allgather(own.view(-1), comm)]
        assert all(torch.equal(one[1:], own[1:]) for one in found), algorithm
        if turn % comm.size == comm.rank:  # one rank simulates
            simulated = SimulatedWorld(comm.size).run(lambda c, algorithm=algorithm: trained(c, algorithm))
            assert all(map(torch.equal, found, simulated)), algorithm


def sums_of_the_transport_agree_within_rounding(comm):
    def run(c, native):
        model, optimizer = begin(c, DiLoCo, native=native)
        train(c, model, optimizer, range(STEPS))
        optimizer.finish()
        return flat(model)

    assert torch.allclose(run(comm, True), run(comm, False), rtol=1e-2, atol=1e-2)


def an_exchange_that_overlaps_is_measured(comm):
    model, optimizer = begin(comm, OverlapLocalSGD)
    train(comm, model, optimizer, range(STEPS))
    assert 0 <= optimizer.hidden_fraction <= 1
    optimizer.finish()


def average_on_some_ranks_only(comm):
    """The last one goes elsewhere."""
    model, optimizer = begin(comm, LocalSGD)
    comm.timeout = 2.0
    if comm.rank == comm.size - 1:
        with optimizer.averaged_model():
            pass
    train(comm, model, optimizer, range(3))


def other_algorithm_of_the_family(comm):
    begin(comm, BMUF if comm.rank == comm.size - 1 else LocalSGD)


def nan_parameter(comm):
    model, optimizer = begin(comm, DiLoCo)
    train(comm, model, optimizer, range(2))
    if comm.rank == comm.size - 1:
        with torch.no_grad():
            model["b"][3, 3] = float("nan")
    train(comm, model, optimizer, range(2, 4))


LAWS = [
    training_has_the_bits_of_the_simulated_world_for_local_sgd,
    sums_of_the_transport_agree_within_rounding,
    an_exchange_that_overlaps_is_measured,
]
FAILURES = {
    average_on_some_ranks_only: "ranks disagree on call ",
    other_algorithm_of_the_family: "ranks disagree on call 0: rank 0 calls LocalSGD(buffers='keep', inner_state='keep'",
    nan_parameter: "DiLoCo: the average is not finite in 'b'; NaN or inf in the parameters of ranks [{last}]",
}
SELDOM = [training_has_the_bits_of_the_simulated_world_for_local_sgd]
