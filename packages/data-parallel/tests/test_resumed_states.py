"""A resumed training has the bits of one that never stopped, with algorithms that keep a state between calls."""

import pytest
import torch
from communicators import SimulatedWorld
from sparse_collectives import ALGORITHMS

pytestmark = pytest.mark.quick

OFTEN = {"thresholds_every": 2, "boundaries_every": 3}


@pytest.mark.parametrize("half", [1, 2, 3])
def test_a_resumed_run_has_the_same_bits_wherever_the_counters_stand(half, train):
    options = {"algorithm": "oktopk", "options": OFTEN}
    whole = SimulatedWorld(3).run(lambda c: train(c, range(6), **options))
    first = SimulatedWorld(3).run(lambda c: train(c, range(half), **options))
    rest = SimulatedWorld(3).run(lambda c: train(c, range(half, 6), saved=first[c.rank], **options))
    for (model, _), (other, _) in zip(whole, rest, strict=True):
        assert all(torch.equal(model[name], other[name]) for name in model)


@pytest.mark.parametrize("size", [3, 6])
def test_a_resumed_run_in_teams_has_the_same_bits(size, train):
    options = {"algorithm": "spardl", "options": {"teams": 3}, "bucket_bytes": 100}
    whole = SimulatedWorld(size).run(lambda c: train(c, range(6), **options))
    half = SimulatedWorld(size).run(lambda c: train(c, range(3), **options))
    assert all(s["step"] == 3 for _, s in half[0][1]["distributed"]["algorithm_state"])
    rest = SimulatedWorld(size).run(lambda c: train(c, range(3, 6), saved=half[c.rank], **options))
    for (model, _), (other, _) in zip(whole, rest, strict=True):
        assert all(torch.equal(model[name], other[name]) for name in model)


@pytest.mark.parametrize("name", [name for name, algorithm in ALGORITHMS.items() if algorithm.selects])
def test_a_resumed_run_on_a_wire_of_fewer_bytes_has_the_same_bits(name, train):
    options = {"algorithm": name, "wire": "bf16-packed", "bucket_bytes": 100}
    whole = SimulatedWorld(3).run(lambda c: train(c, range(6), **options))
    half = SimulatedWorld(3).run(lambda c: train(c, range(3), **options))
    rest = SimulatedWorld(3).run(lambda c: train(c, range(3, 6), saved=half[c.rank], **options))
    for (model, _), (other, _) in zip(whole, rest, strict=True):
        assert all(torch.equal(model[part], other[part]) for part in model)
