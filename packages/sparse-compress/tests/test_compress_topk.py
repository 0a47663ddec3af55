"""Top-k against a stable sort on the magnitudes' bits: indices and values are the same bits."""

import numpy as np
import pytest
import torch
from devices import every_other_device
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_compress import SparseVector, topk
from sparse_compress.magnitude import largest, largest_on_device, magnitude_keys

pytestmark = pytest.mark.usefixtures("both_ways")

INT_DTYPES = {2: torch.int16, 4: torch.int32, 8: torch.int64}
WIRE_DTYPES = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.float32: torch.float32}
seeds = st.integers(0, 2**32 - 1)


def keys_of(x):
    bits = x.reshape(-1).view(INT_DTYPES[x.element_size()]).numpy().astype(np.int64)
    return bits & (1 << 8 * x.element_size() - 1) - 1


def reference(x, k):
    """Indices of the k largest magnitudes, ascending."""
    return np.sort(np.argsort(-keys_of(x), kind="stable")[:k])


def assert_selects(sparse, x, k):
    indices = reference(x, k)
    expected = x.reshape(-1)[torch.from_numpy(indices)].to(WIRE_DTYPES.get(x.dtype, x.dtype))
    assert sparse.numel == x.numel()
    np.testing.assert_array_equal(sparse.indices.numpy(), indices)
    assert sparse.indices.dtype == torch.int32
    assert sparse.values.dtype == expected.dtype
    np.testing.assert_array_equal(keys_of(sparse.values), keys_of(expected))
    assert torch.equal(sparse.values.signbit(), expected.signbit())


@pytest.mark.few(8)
@settings(max_examples=7 * settings.default.max_examples)
@given(seed=seeds, n=st.integers(1, 2000), data=st.data())
def test_small(nasty, seed, n, data):
    x = torch.from_numpy(nasty(np.random.default_rng(seed), n))
    k = data.draw(st.integers(0, n + 3))
    assert_selects(topk(x, k), x, k)


@settings(max_examples=settings.default.max_examples // 3)
@given(seed=seeds, n=st.integers(8_000, 300_000), data=st.data())
def test_large(nasty, seed, n, data):
    x = torch.from_numpy(nasty(np.random.default_rng(seed), n))
    k = data.draw(st.sampled_from([1, 2, n // 1000, n // 100, n // 10, n // 2, n - 1, n]) | st.integers(1, n))
    assert_selects(topk(x, k), x, k)


@settings(max_examples=10 * settings.default.max_examples)
@given(st.lists(st.floats(width=32) | st.sampled_from([0.0, -0.0, 1.0, -1.0]), max_size=40), st.integers(0, 45))
def test_any_floats(elements, k):
    x = torch.tensor(elements, dtype=torch.float32)
    assert_selects(topk(x, k), x, k)


@pytest.mark.few(24)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@settings(max_examples=settings.default.max_examples // 5)
@given(seed=seeds, n=st.integers(1, 300) | st.integers(8_000, 200_000))
def test_other_dtypes(nasty, dtype, seed, n):
    x = torch.from_numpy(nasty(np.random.default_rng(seed), n)).to(dtype)
    for k in (1, n // 100 + 1, n // 2 + 1):
        assert_selects(topk(x, k), x, k)


@settings(max_examples=settings.default.max_examples // 2)
@given(seed=seeds, n=st.integers(1, 3000) | st.integers(8_000, 200_000), data=st.data())
def test_every_path_alone_is_exact(nasty, seed, n, data):
    """The CPU's reference and the path of other devices, each called by itself."""
    x = torch.from_numpy(nasty(np.random.default_rng(seed), n))
    k = data.draw(st.integers(1, n))
    expected = reference(x, k)
    np.testing.assert_array_equal(np.sort(largest_on_device(magnitude_keys(x), k)), expected)
    np.testing.assert_array_equal(np.flatnonzero(largest(magnitude_keys(x), k)), expected)


def test_views_are_flattened_row_by_row():
    x = torch.randn(400, 300, generator=torch.Generator().manual_seed(0))
    for view in (x.T, x[::2, ::3], x[:, 5], x.expand(2, 400, 300), x.flatten()[::7], x[3, 3], x.permute(1, 0)[None]):
        assert_selects(topk(view, 50), view.contiguous(), 50)


def test_negated_view():
    x = torch.view_as_complex(torch.tensor([[1.0, 2.0], [3.0, -4.0]])).conj().imag
    assert x.is_neg()
    assert topk(x, 1).to_dense().tolist() == [0, 4]


def test_a_parameter_loses_its_graph_and_stays_as_it_is():
    x = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    sparse = topk(x, 1)
    assert not sparse.values.requires_grad
    sparse.values.zero_()
    assert x.tolist() == [1, -2]


def test_empty_and_short():
    assert len(topk(torch.empty(0), 5)) == 0
    assert len(topk(torch.ones(5), 0)) == 0
    assert topk(torch.zeros(2, 2), 9).indices.tolist() == [0, 1, 2, 3]
    assert topk(torch.tensor(3.0), 1).to_dense().tolist() == [3]


def test_non_finite_come_first():
    x = torch.tensor([1e38, torch.inf, -torch.nan, 2e38, -torch.inf])
    assert topk(x, 1).indices.tolist() == [2]
    assert topk(x, 3).indices.tolist() == [1, 2, 4]


def test_nothing_is_read_back_from_a_device():
    """Meta tensors have no data: reading any would raise."""
    sparse = topk(torch.empty(1000, device="meta", dtype=torch.bfloat16), 10)
    assert (len(sparse), sparse.dtype, sparse.device.type) == (10, torch.float32, "meta")


@pytest.mark.parametrize(
    ("x", "k", "error", "message"),
    [
        (torch.ones(3), -1, ValueError, "k is -1"),
        (torch.ones(3), 1.5, TypeError, "float"),
        (torch.ones(3, dtype=torch.int32), 1, TypeError, "int32"),
        (torch.ones(3, dtype=torch.complex64), 1, TypeError, "complex64"),
        (torch.ones(3).to_sparse(), 1, TypeError, "to_dense"),
        (torch.empty(1).expand(2**31), 1, ValueError, "2147483647"),
    ],
)
def test_bad_input(x, k, error, message):
    with pytest.raises(error, match=message):
        topk(x, k)


@every_other_device
def test_a_device_selects_the_same_bits(device, nasty):
    for n, k in ((1, 1), (1025, 100), (300_000, 3000)):
        x = torch.from_numpy(nasty(np.random.default_rng(n), n))
        on_gpu, on_cpu = topk(x.to(device), k), topk(x, k)
        assert torch.equal(on_gpu.pack().cpu(), on_cpu.pack())
        assert torch.equal(SparseVector.unpack(on_gpu.pack(), like=on_gpu).indices.cpu(), on_cpu.indices)
