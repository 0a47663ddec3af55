"""The laws of the ring, and that it trains."""

import torch
from communicators import SimulatedWorld, testing
from hypothesis import given, settings
from hypothesis import strategies as st
from ring_reduce_scatter import RING
from ring_reduce_scatter.train import train
from sparse_collectives.testing import check_sparse_call, check_sparse_laws
from sparse_compress import topk


def test_laws():
    """Conservation, agreement, worlds agree, bytes, rounds, on every wire, at P = 1, 2, 3, 5, 8."""
    check_sparse_laws(RING)


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_laws_on_what_hypothesis_draws(data):
    dense = data.draw(testing.inputs(numels=st.integers(1, 60)))
    k = data.draw(st.integers(1, len(dense[0])))
    check_sparse_call(RING, [topk(x, k) for x in dense], k=k)


def test_bytes_of_a_ring():
    """2(P − 1)/P·8k where P divides k and n, and a header of 32 bytes a message."""
    assert RING.sent(0, 4, 100, 1000, torch.float32).nbytes == 2 * 3 * (8 * 25 + 32)


def test_ranks_learn_and_stay_alike():
    losses = SimulatedWorld(3).run(train)
    assert all(own[-1] < 0.7 * own[0] for own in losses)
