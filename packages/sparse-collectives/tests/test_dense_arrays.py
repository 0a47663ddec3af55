"""Sparse allreduce of dense arrays: what the user has comes back, and nothing is lost."""

import warnings

import numpy as np
import pytest
import torch
from communicators import CollectiveError, SimulatedWorld, testing
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_collectives import ALGORITHMS, sparse_allreduce, sparse_allreduce_array, sparse_allreduce_array_async
from sparse_compress import topk
from torch.testing._internal.two_tensor import TwoTensor

pytestmark = pytest.mark.quick

SPARSE = [name for name, entry in ALGORITHMS.items() if entry.selects]


@pytest.mark.slow
@pytest.mark.few(3)
@pytest.mark.parametrize("name", SPARSE)
@settings(max_examples=settings.default.max_examples // 2)
@given(inputs=testing.inputs(numels=st.integers(1, 30)), k=st.integers(1, 30))
def test_numpy_arrays_obey_the_laws(name, inputs, k):
    testing.check_laws(
        lambda comm, x: sparse_allreduce_array(x, comm, k=k, algorithm=name),
        [x.numpy() for x in inputs],
        dense=torch.from_numpy,
        total=lambda reduction: torch.from_numpy(reduction.total),
        dropped=lambda reduction: torch.from_numpy(reduction.dropped),
    )


@given(inputs=testing.inputs(numels=st.integers(1, 30)), k=st.integers(1, 30))
def test_the_total_is_that_of_sparse_vectors(inputs, k):
    dense = SimulatedWorld(len(inputs)).run(lambda comm: sparse_allreduce_array(inputs[comm.rank], comm, k=k))
    sparse = SimulatedWorld(len(inputs)).run(lambda comm: sparse_allreduce(topk(inputs[comm.rank], k), comm, k=k))
    for one, other in zip(dense, sparse, strict=True):
        assert torch.equal(one.total, other.total.to_dense())


def summed_in(array):
    """The dtype of results: float32 for 16-bit floats, whose rounding no residual would have."""
    if array.dtype in (torch.float16, torch.bfloat16):
        return torch.float32
    return np.dtype(np.float32) if array.dtype == np.float16 else array.dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("algorithm", [name for name, entry in ALGORITHMS.items() if entry.selects])
def test_16_bit_floats_are_conserved(algorithm, dtype):
    """101 + 102 + 104 is no bfloat16."""
    inputs = [torch.tensor([value, 3.0, 0.5]).to(dtype) for value in (101.0, 102.0, 104.0)]
    got = SimulatedWorld(3).run(lambda comm: sparse_allreduce_array(inputs[comm.rank], comm, k=2, algorithm=algorithm))
    whole = got[0].total + sum(reduction.dropped for reduction in got)
    assert torch.equal(whole, sum(x.float() for x in inputs))


@pytest.mark.parametrize("given_", [np.ones((3, 4), np.float16), np.ones((3, 4))[:, ::2], torch.ones(3, 4).bfloat16()])
def test_shape_dtype_and_kind_stay_and_the_input_too(given_):
    before = given_.copy() if isinstance(given_, np.ndarray) else given_.clone()
    for reduction in SimulatedWorld(2).run(lambda comm: sparse_allreduce_array(given_, comm, k=4)):
        for part in (reduction.total, reduction.dropped):
            assert type(part) is type(given_)
            assert (part.shape, part.dtype) == (given_.shape, summed_in(given_))
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
@pytest.mark.parametrize("call", [sparse_allreduce_array, lambda *a, **o: sparse_allreduce_array_async(*a, **o).wait()])
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
        work = sparse_allreduce_array_async(x, comm, k=3)
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


@settings(max_examples=settings.default.max_examples // 2)
@given(inputs=testing.inputs(numels=st.integers(1, 30)), background=st.booleans())
def test_dense_sums_all_of_an_array(inputs, background):
    """It has no k: nothing is selected, and nothing dropped."""
    before = [x.clone() for x in inputs]

    def collective(comm, x):
        if not background:
            return sparse_allreduce_array(x, comm, algorithm="dense")
        x = x.clone()
        work = sparse_allreduce_array_async(x, comm, algorithm="dense")
        x.fill_(777)
        return work.wait()

    results = testing.check_laws(collective, inputs, total=lambda r: r.total, dropped=lambda r: r.dropped)
    for result in results:
        assert torch.equal(result.total, sum(before))
        assert not result.dropped.any()
        result.total.fill_(5)  # its own memory
    assert all(map(torch.equal, inputs, before))


@pytest.mark.parametrize("given_", [np.ones((3, 4), np.float16), np.ones((3, 4))[:, ::2], torch.ones(3, 4).bfloat16()])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_dense_keeps_shape_dtype_and_kind(given_, size):
    for reduction in SimulatedWorld(size).run(lambda comm: sparse_allreduce_array(given_, comm, algorithm="dense")):
        for part in (reduction.total, reduction.dropped):
            assert type(part) is type(given_)
            assert (part.shape, part.dtype) == (given_.shape, summed_in(given_))
        assert (reduction.total == size).all()


def test_dense_of_an_array_and_of_a_sparse_vector_take_what_they_need():
    [alone] = SimulatedWorld(1).run(lambda comm: comm)
    for array in (np.ones(5, np.float32), torch.ones(5)):
        with pytest.raises(ValueError, match="dense sums all of an array, but k=2 was given: leave k out"):
            sparse_allreduce_array(array, alone, k=2, algorithm="dense")
        with pytest.raises(TypeError, match=r"k is None .*expected an integer: the most entries"):
            sparse_allreduce_array(array, alone)
        with pytest.raises(ValueError, match="dense sends values as they are"):
            sparse_allreduce_array(array, alone, algorithm="dense", wire="bf16")
        with pytest.raises(ValueError, match="dense has no option teams"):
            sparse_allreduce_array(array, alone, algorithm="dense", options={"teams": 1})
        with pytest.raises(ValueError, match="dense keeps no state"):
            sparse_allreduce_array(array, alone, algorithm="dense", state={})
    with pytest.raises(TypeError, match="k is None"):
        sparse_allreduce(topk(torch.ones(5), 2), alone, k=None, algorithm="dense")


def test_auto_sums_all_of_an_array_where_it_takes_dense():
    x = torch.randint(-9, 10, (3, 50)).float()

    def body(comm):
        state, call = {}, {"k": 20, "algorithm": "auto"}
        sparse_allreduce_array(x[comm.rank], comm, state=state, **call)
        next(iter(state.values())).update(algorithm="dense", options={}, state=None)  # as if that had been faster
        return sparse_allreduce_array(x[comm.rank], comm, state=state, **call)

    for reduction in SimulatedWorld(3).run(body):
        assert torch.equal(reduction.total, x.sum(0))
        assert not reduction.dropped.any()


@pytest.mark.parametrize("algorithm", ["gtopk", "dense"])
@pytest.mark.parametrize(("one", "other"), [((2, 6), (3, 4)), ((12,), (12, 1)), ((12,), (3, 4))])
def test_ranks_with_unlike_shapes_are_refused(algorithm, one, other):
    k = {} if algorithm == "dense" else {"k": 3}

    def body(comm):
        with pytest.raises(CollectiveError) as error:
            sparse_allreduce_array(np.ones(other if comm.rank == 2 else one), comm, algorithm=algorithm, **k)
        return str(error.value)

    told = SimulatedWorld(3).run(body)
    assert len(set(told)) == 1
    assert f"calls {algorithm}(shape={one}" in told[0]
    assert f"rank 2 calls {algorithm}(shape={other}" in told[0]


@pytest.mark.parametrize("algorithm", ["gtopk", "dense"])
def test_ranks_with_unlike_dtypes_are_refused(algorithm):
    """float16 and bfloat16 both travel as float32, but would be rounded otherwise at the end."""
    k, x = {} if algorithm == "dense" else {"k": 3}, torch.ones(9)

    def body(comm):
        with pytest.raises(CollectiveError, match=r"torch.float16.*torch.bfloat16"):
            sparse_allreduce_array(x.bfloat16() if comm.rank else x.half(), comm, algorithm=algorithm, **k)

    SimulatedWorld(2).run(body)


def special():
    """Arrays and tensors of every kind: what is said of those that are refused, None where they work."""
    return {
        "masked": (np.ma.masked_array(np.ones(6), mask=[0, 1] * 3), "masked array.*filled"),
        "masked without a mask": (np.ma.masked_array(np.ones(6)), "masked array.*filled"),
        "matrix": (np.ones((2, 3)).view(np.matrix), None),
        "0-d": (np.array(3.0), None),
        "0-d tensor": (torch.tensor(3.0), None),
        "Fortran": (np.asfortranarray(np.ones((2, 3))), None),
        "broadcast": (np.broadcast_to(np.ones(1), (6,)), None),
        "expanded": (torch.ones(1).expand(6), None),
        "parameter": (torch.nn.Parameter(torch.ones(6)), None),
        "conjugated": (torch.ones(6, dtype=torch.complex64).conj(), "complex64"),
        "negated": (torch.ones(6, dtype=torch.complex64).conj().imag, None),
        "object": (np.array([1.0, None]), "dtype object, expected float16, float32 or float64"),
        "complex": (np.ones(6, np.complex64), "dtype complex64"),
        "structured": (np.zeros(3, dtype=[("a", "f4")]), "dtype .*expected float16"),
        "other byte order": (np.ones(6, ">f4"), "dtype >f4.*byte order"),
        "long double": (np.ones(6, np.longdouble), "expected float16"),
        "integers": (np.ones(6, np.int64), "int64"),
        "integer tensor": (torch.ones(6, dtype=torch.int64), "int64"),
        "bools": (np.ones(6, bool), "bool"),
        "text": (np.array(["a"]), "dtype"),
        "sparse tensor": (torch.ones(6).to_sparse(), "layout torch.sparse_coo.*to_dense"),
        "csr tensor": (torch.eye(3).to_sparse_csr(), "layout torch.sparse_csr.*to_dense"),
        "mkldnn": (torch.ones(6).to_mkldnn(), "layout"),
        "quantized": (torch.quantize_per_tensor(torch.ones(6), 0.1, 0, torch.qint8), "qint8"),
        "nested": (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
        "jagged": (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "nested"),
        "meta": (torch.ones(6, device="meta"), "meta device"),
        "wrapper": (TwoTensor(torch.ones(6), torch.ones(6)), "TwoTensor"),
        "list": ([1.0, 2.0], r"list, expected a dense array.*NumPy array.*np\.asarray"),
        "tuple": ((1.0, 2.0), "tuple, expected .*np.asarray"),
        "float": (1.0, "float, expected .*np.asarray"),
        "scalar": (np.float32(1.0), "float32, expected .*np.asarray"),
        "None": (None, "NoneType, expected a dense array"),
        "text as it is": ("abc", "str, expected a dense array"),
    }


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    SPECIAL = special()


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["gtopk", "dense"])
@pytest.mark.parametrize("call", [sparse_allreduce_array, lambda *a, **o: sparse_allreduce_array_async(*a, **o).wait()])
@pytest.mark.parametrize("kind", SPECIAL)
def test_arrays_of_every_kind_work_or_are_refused(kind, call, algorithm):
    given_, says = SPECIAL[kind]
    k = {} if algorithm == "dense" else {"k": 6}
    if says is not None:
        [alone] = SimulatedWorld(1).run(lambda comm: comm)
        with pytest.raises(TypeError, match=says):
            call(given_, alone, algorithm=algorithm, **k)
        return
    for reduction in SimulatedWorld(3).run(lambda comm: call(given_, comm, algorithm=algorithm, **k)):
        assert reduction.total.shape == given_.shape
        assert reduction.total.dtype == given_.dtype
        plain = given_ if isinstance(given_, np.ndarray) else given_.detach().resolve_neg()
        assert (np.asarray(reduction.total) == 3 * np.asarray(plain)).all()


@pytest.mark.parametrize("array", [np.ones((0, 3)), torch.ones(0)])
def test_nothing_to_sum(array):
    [alone] = SimulatedWorld(1).run(lambda comm: comm)
    for arguments in ({"algorithm": "dense"}, {"k": 1}):
        with pytest.raises(ValueError, match="nothing to sum"):
            sparse_allreduce_array(array, alone, **arguments)
