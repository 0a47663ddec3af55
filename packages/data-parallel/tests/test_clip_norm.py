"""Clipping: each rank's own gradient, before the selection; what it takes away is not mass."""

import math
import warnings

import pytest
import torch
from communicators import CollectiveError, SimulatedWorld
from data_parallel import DistributedOptimizer, UpdateOptimizer
from hypothesis import given
from hypothesis import strategies as st
from sparse_collectives import ALGORITHMS
from sparse_compress import TopK, WarmUp
from torch import nn

pytestmark = pytest.mark.quick


def made(comm, shapes=((3, 4), (5,), (2,)), **options):
    model = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in shapes])
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    return list(model), DistributedOptimizer(inner, model.named_parameters(), comm=comm, **options)


@given(
    size=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 999),
    clip_norm=st.sampled_from([0.25, 1.0, 8.0, 1e6]),
    bucket_bytes=st.sampled_from([None, 20, 4]),
    overlap=st.booleans(),
)
def test_the_clipped_gradients_are_all_that_is_conserved(size, seed, clip_norm, bucket_bytes, overlap):
    """Σ clipped = P · applied + Σ residuals; each rank's part is its gradient times one factor, ≤ clip_norm · √P."""

    def body(comm):
        generator = torch.Generator().manual_seed(100 * seed + comm.rank)
        options = {"clip_norm": clip_norm, "bucket_bytes": bucket_bytes, "overlap": overlap}
        parameters, optimizer = made(comm, compressor=TopK(0.2), **options)
        gradients = [torch.randn(p.shape, generator=generator) for p in parameters]
        sum((p * g).sum() for p, g in zip(parameters, gradients, strict=True)).backward()
        optimizer.step()
        kept = optimizer.state_dict()["distributed"]["residuals"]
        residual = torch.cat([kept[name].view(-1) for name in sorted(kept)]).double()
        flat = torch.cat([g.view(-1) for g in gradients]).double()
        return flat, torch.cat([p.detach().view(-1) for p in parameters]).double(), residual

    results, limit = SimulatedWorld(size).run(body), clip_norm * math.sqrt(size)
    total = -size * results[0][1] + sum(residual for _, _, residual in results)
    if overlap:  # by bucket: shorter, never longer
        assert total.norm() <= size * limit * 1.001
    else:
        clipped = sum(flat * min(1.0, limit / float(flat.norm())) for flat, _, _ in results)
        torch.testing.assert_close(total, clipped, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("large", [{2}, {12, 5, 2}], ids=["in one bucket", "in all"])
@pytest.mark.parametrize("overlap", [False, True])
def test_no_rank_gives_more_than_its_part_whatever_the_buckets_hold(overlap, large):

    def body(comm):
        parameters, optimizer = made(comm, clip_norm=2.0, compressor=TopK(1.0), overlap=overlap, bucket_bytes=8)
        weights = [1e3 if p.numel() in large else 1e-3 for p in parameters]
        sum((p * weight).sum() for p, weight in zip(parameters, weights, strict=True)).backward()
        optimizer.step()
        return torch.cat([p.detach().view(-1) for p in parameters]).norm()

    for norm in SimulatedWorld(4).run(body):
        assert norm <= 2.0 * 2 * 1.0001
        assert norm > 1.0


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_takes_it(name):
    def body(comm):
        parameters, optimizer = made(comm, algorithm=name, compressor=TopK(1.0), clip_norm=0.5)
        sum(p.sum() for p in parameters).backward()
        optimizer.step()
        return torch.cat([p.detach().view(-1) for p in parameters]).norm().item()

    assert SimulatedWorld(4).run(body) == pytest.approx([1.0] * 4, rel=1e-5)  # 0.5 · √4


def test_what_is_not_finite_is_still_named():
    def body(comm):
        parameters, optimizer = made(comm, clip_norm=1.0)
        for p in parameters:
            p.grad = torch.ones_like(p)
        if comm.rank == 1:
            parameters[1].grad[2] = torch.inf
        with pytest.raises(CollectiveError, match="rank 1: the gradient of '1' is not finite"):
            optimizer.step()

    SimulatedWorld(2).run(body)


@pytest.mark.parametrize("late", [0, 70])
def test_clipping_after_a_sparse_exchange_is_warned_about_once(late):
    def body(comm):
        parameters, optimizer = made(comm, density=WarmUp(0.2, steps=late, stages=(1.0,)))
        said = []
        for step in range(late + 20):
            optimizer.zero_grad()
            sum((10 * p).sum() for p in parameters).backward()
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(parameters, 1.0 if step >= late else 1e9)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                optimizer.step()
            said += [str(warning.message) for warning in caught]
        return said

    for said in SimulatedWorld(2).run(body):
        assert len(said) == 1
        assert "clip_norm=" in said[0]


@pytest.mark.parametrize(
    ("clip_norm", "error"),
    [(0, ValueError), (-1.0, ValueError), (math.inf, ValueError), ("1", TypeError), (True, TypeError)],
)
def test_what_is_no_norm(clip_norm, error):
    with pytest.raises(error, match="clip_norm is"):
        made(None, clip_norm=clip_norm)


def test_ranks_that_clip_otherwise_are_told():
    def body(comm):
        with pytest.raises(CollectiveError, match="clip_norm="):
            made(comm, clip_norm=1.0 + comm.rank)

    SimulatedWorld(2).run(body)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("clip_norm", [0.25, 1e6])
def test_updates_are_those_of_clipped_gradients(size, clip_norm):
    """Of SGD with a rate of 1, where all is sent: Σ clipped = P · applied; one has no gradient."""

    def body(comm):
        model = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in ((3, 4), (5,), (2,))])
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        settings = {"density": 1.0, "clip_norm": clip_norm, "dense_below": 0}
        optimizer = UpdateOptimizer(inner, model.named_parameters(), comm=comm, **settings)
        generator = torch.Generator().manual_seed(comm.rank)
        gradients = [torch.randn(p.shape, generator=generator) for p in list(model)[:2]]
        with optimizer.ahead():
            for p, gradient in zip(model, gradients, strict=False):
                p.grad = gradient.clone()
        optimizer.step()
        flat = torch.cat([g.view(-1) for g in gradients])
        return flat * min(1.0, clip_norm * math.sqrt(size) / float(flat.norm())), torch.cat(
            [p.detach().view(-1) for p in list(model)[:2]]
        )

    results = SimulatedWorld(size).run(body)
    torch.testing.assert_close(-size * results[0][1], sum(clipped for clipped, _ in results), rtol=1e-5, atol=1e-5)
