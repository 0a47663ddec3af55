"""sparse_allreduce of dense arrays: what the user has comes back, and nothing is lost."""

import numpy as np
import pytest
import torch
from communicators import SimulatedWorld, testing
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_collectives import ALGORITHMS, sparse_allreduce
from sparse_compress import topk


@pytest.mark.parametrize("name", ALGORITHMS)
@settings(max_examples=15)
@given(inputs=testing.inputs(numels=st.integers(1, 30)), k=st.integers(1, 30))
def test_numpy_arrays_obey_the_laws(name, inputs, k):
    testing.check_laws(
        lambda comm, x: sparse_allreduce(x, comm, k=k, algorithm=name),
        [x.numpy() for x in inputs],
        dense=torch.from_numpy,
        total=lambda reduction: torch.from_numpy(reduction.total),
        dropped=lambda reduction: torch.from_numpy(reduction.dropped),
    )


@given(inputs=testing.inputs(numels=st.integers(1, 30)), k=st.integers(1, 30))
def test_the_total_is_that_of_sparse_vectors(inputs, k):
    dense = SimulatedWorld(len(inputs)).run(lambda comm: sparse_allreduce(inputs[comm.rank], comm, k=k))
    sparse = SimulatedWorld(len(inputs)).run(lambda comm: sparse_allreduce(topk(inputs[comm.rank], k), comm, k=k))
    for one, other in zip(dense, sparse, strict=True):
        assert torch.equal(one.total, other.total.to_dense())


@pytest.mark.parametrize("given_", [np.ones((3, 4), np.float16), np.ones((3, 4))[:, ::2], torch.ones(3, 4).bfloat16()])
def test_shape_dtype_and_kind_stay_and_the_input_too(given_):
    before = given_.copy() if isinstance(given_, np.ndarray) else given_.clone()
    for reduction in SimulatedWorld(2).run(lambda comm: sparse_allreduce(given_, comm, k=4)):
        for part in (reduction.total, reduction.dropped):
            assert type(part) is type(given_)
            assert (part.shape, part.dtype) == (given_.shape, given_.dtype)
    assert (given_ == before).all()


def test_integers_are_refused():
    with pytest.raises(TypeError, match="expected float16, float32 or float64"):
        SimulatedWorld(2).run(lambda comm: sparse_allreduce(np.ones(5, np.int64), comm, k=2))
