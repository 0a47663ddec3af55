"""sparse_allreduce of dense arrays: what the user has comes back, and nothing is lost."""

import numpy as np
import pytest
import torch
from communicators import SimulatedWorld, testing
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_collectives import ALGORITHMS, sparse_allreduce, sparse_allreduce_async
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


def laid_out():
    """The same numbers in memory of every kind."""
    plain = np.random.default_rng(0).permutation(24).astype(np.float32).reshape(4, 6) - 12
    read_only = plain.copy()
    read_only.flags.writeable = False
    packed = np.zeros(plain.shape, dtype=[("other", "i1"), ("value", "f4")])
    packed["value"] = plain
    return {
        "plain": plain,
        "reversed": plain[::-1, ::-1].copy()[::-1, ::-1],
        "fortran": np.asfortranarray(plain),
        "every other": np.repeat(plain, 2, axis=1)[:, ::2],
        "read-only": read_only,
        "unaligned": packed["value"],
        "subclass": plain.view(np.matrix),
    }


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", laid_out())
@pytest.mark.parametrize("call", [sparse_allreduce, lambda *a, **o: sparse_allreduce_async(*a, **o).wait()])
def test_numpy_memory_of_every_kind_gives_the_same_and_stays_as_it_is(kind, call):
    arrays = laid_out()
    given_, before = arrays[kind], arrays["plain"].copy()

    def body(comm, x):
        return call(x, comm, k=5)

    for one, plain in zip(
        SimulatedWorld(2).run(lambda comm: body(comm, given_)),
        SimulatedWorld(2).run(lambda comm: body(comm, arrays["plain"])),
        strict=True,
    ):
        assert type(one.total) is type(one.dropped) is np.ndarray
        assert np.array_equal(one.total, plain.total)
        assert np.array_equal(one.dropped, plain.dropped)
        assert not np.shares_memory(one.dropped, given_)
    assert np.array_equal(given_, before)


@pytest.mark.parametrize("kind", [torch.from_numpy, np.asarray])
def test_in_the_background_the_input_may_change_at_once(kind):
    inputs = np.random.default_rng(1).integers(-9, 10, (3, 2, 4)).astype(np.float32)

    def body(comm):
        x = kind(inputs[comm.rank].copy())
        work = sparse_allreduce_async(x, comm, k=3)
        x[...] = 99
        reduction = work.wait()
        assert type(reduction.total) is type(reduction.dropped) is type(x)
        assert reduction.total.shape == reduction.dropped.shape == x.shape
        return reduction

    results = SimulatedWorld(3, jitter=1e-3).run(body)
    for reduction in results:
        assert (reduction.total == results[0].total).all()
    lost = inputs.sum(0) - np.asarray(results[0].total) - sum(np.asarray(r.dropped) for r in results)
    assert not lost.any()


@pytest.mark.parametrize("call", [sparse_allreduce, sparse_allreduce_async])
def test_integers_are_refused(call):
    with pytest.raises(TypeError, match="expected float16, float32 or float64"):
        SimulatedWorld(2).run(lambda comm: call(np.ones(5, np.int64), comm, k=2))
