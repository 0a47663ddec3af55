"""The law, of the exchange itself: of a gradient that is not finite nothing stays in what any rank keeps.

So it holds for whoever uses one: hook, optimizer, sharded model. Nothing at all, not even its finite elements: each
memory of its parameter is as before the step, or begins anew.
"""

from __future__ import annotations

import copy
from math import isfinite

import pytest
import torch
from communicators import Bucket, CollectiveError, SimulatedWorld
from data_parallel.exchange import Exchange
from data_parallel.settings import Settings
from hypothesis import given
from hypothesis import strategies as st
from sparse_collectives.algorithms.table import ALGORITHMS
from sparse_compress import RandomK, TopK

SHAPES = {"a": (5, 8), "b": (7,), "c": (9, 6), "d": (1,)}
SPARSE = [name for name, entry in ALGORITHMS.items() if entry.selects]
WHOLE = ("powersgd", "dense-int8", "dense")
FAR_OUT = 3e38  # finite, and found beside an inf as often as not
VALUES = st.sampled_from([float("nan"), float("inf"), -float("inf"), FAR_OUT])


def exchange_of(comm, nonfinite, *, algorithm, momentum, dense_below, compressor, wire):
    settings = Settings(
        algorithm=algorithm,
        options={"dense_steps": 0} if algorithm == "powersgd" else None,
        wire=wire,
        compressor=compressor(),
        momentum=momentum,
        dense_below=dense_below,
        nonfinite=nonfinite,
    )
    return Exchange(settings, comm, list(SHAPES), [], owner="a test")


def step(exchange, buckets, number, bad):
    """The means of the buckets, and the errors."""
    generator = torch.Generator().manual_seed(100 * number + exchange.comm.rank)
    works = []
    for bucket in buckets:
        flat = torch.randn(bucket.numel, generator=generator)
        for member, view in zip(bucket.members, bucket.views(flat), strict=True):
            for element, value in bad.get((exchange.comm.rank, member), {}).items():
                view.view(-1)[element % view.numel()] = value
        works.append(exchange.start(bucket, flat))
    means, errors = [], []
    for work in works:
        try:
            means.append(work.wait().clone())
        except CollectiveError as error:
            errors.append(str(error))
    return means, errors


def numbers_in(kept):
    """All that is kept: error state by name, and what an algorithm keeps, in lists and dicts of plain values."""
    if isinstance(kept, torch.Tensor):
        return [kept.double().view(-1)] if kept.is_floating_point() else []
    if isinstance(kept, float):
        return [torch.tensor([kept], dtype=torch.float64)]
    inside = kept.values() if isinstance(kept, dict) else kept if isinstance(kept, list | tuple) else ()
    return [found for each in inside for found in numbers_in(each)]


def run(comm, bad, *, nonfinite, ends, together, settings):
    """Four steps, the second with `bad`: how each went."""
    exchange = exchange_of(comm, nonfinite, **settings)
    cut = ((0, 1, 2, 3),) if together else ((0, 1), (2, 3))
    shapes, cpu = [torch.Size(shape) for shape in SHAPES.values()], torch.device("cpu")
    buckets = [Bucket(members, tuple(shapes[m] for m in members), torch.float32, cpu) for members in cut]
    told = []
    for number, its in enumerate(({}, bad, {}, {})):
        before = copy.deepcopy(kept_by_parameter(exchange))
        means, errors = step(exchange, buckets, number, its)
        stands = False
        if not errors or ends == "settle":
            stands = exchange.commit_or_rollback()
        elif ends == "undo":
            exchange.undo()
        if stands and not errors:
            assert all(bool(mean.isfinite().all()) for mean in means)
        assert all(bool(kept.isfinite().all()) for kept in numbers_in(exchange.state_dict()))
        for what, kept in kept_by_parameter(exchange).items():
            if what[1] in spoiled(comm.rank, its):
                assert not bool(kept.any()) or torch.equal(kept, before[what]), what
        told.append((len(errors), stands))
    return told


def kept_by_parameter(exchange):
    return {(kind, name): t for kind, kept in exchange.error_state().items() for name, t in kept.items()}


def spoiled(rank, bad):
    """The names of this rank's gradients that are not finite."""
    names, numels = list(SHAPES), [torch.Size(shape).numel() for shape in SHAPES.values()]
    its = {
        member: {element % numels[member]: value for element, value in found.items()}
        for (owner, member), found in bad.items()
        if owner == rank
    }
    return [names[member] for member, found in its.items() if not all(map(isfinite, found.values()))]


@pytest.mark.few(2)
@pytest.mark.parametrize("algorithm", [*SPARSE, *WHOLE])
@given(
    size=st.sampled_from([1, 2, 3, 4]),
    bad=st.dictionaries(
        st.tuples(st.integers(0, 3), st.integers(0, 3)),
        st.dictionaries(st.integers(0, 53), VALUES, min_size=1, max_size=54),
        min_size=1,
        max_size=4,
    ),
    nonfinite=st.sampled_from(["raise", "skip"]),
    ends=st.sampled_from(["undo", "settle"]),
    together=st.booleans(),
    momentum=st.sampled_from([0.0, 0.5]),
    dense_below=st.sampled_from([0, 8]),
    compressor=st.sampled_from([lambda: TopK(0.1), lambda: TopK(1.0), lambda: RandomK(0.1, seed=3)]),
    wire=st.sampled_from(["fp32", "bf16", "int8"]),
)
def test_nothing_of_a_gradient_that_is_not_finite_is_kept(
    algorithm, size, bad, nonfinite, ends, together, momentum, dense_below, compressor, wire
):
    selects = algorithm not in WHOLE
    free = selects and not ALGORITHMS[algorithm].prescribes
    settings = {
        "algorithm": algorithm,
        "momentum": momentum if selects else 0.0,
        "dense_below": dense_below if selects else 0,
        "compressor": compressor if free else lambda: TopK(0.1),
        "wire": wire if selects else "fp32",
    }
    bad = {(rank % size, member): found for (rank, member), found in bad.items()}
    options = {"nonfinite": nonfinite, "ends": ends, "together": together, "settings": settings}
    told = SimulatedWorld(size).run(lambda comm: run(comm, bad, **options))
    assert all(each == told[0] for each in told), told
