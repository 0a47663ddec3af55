"""Sparse vectors: validation, the wire form, and that nothing is copied."""

import copy
import io
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_compress import HEADER_BYTES, MAX_NUMEL, SparseVector, merge, topk, wire_nbytes
from sparse_compress.vector import unpacked

pytestmark = pytest.mark.quick

DTYPES = [torch.float32, torch.float64]


def int32(*indices):
    return torch.tensor(indices, dtype=torch.int32)


def vectors(dtype):
    def build(numel, used, seed):
        indices = torch.tensor(sorted(i for i in used if i < numel), dtype=torch.int32)
        return SparseVector(indices, torch.randn(len(indices), dtype=dtype, generator=seed), numel)

    return st.builds(
        build, st.integers(0, 60), st.sets(st.integers(0, 59)), st.integers(0, 9).map(torch.Generator().manual_seed)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=8 * settings.default.max_examples)
@given(data=st.data())
def test_round_trip(dtype, data):
    vector = data.draw(vectors(dtype))
    received = SparseVector.unpack(vector.pack().clone())
    assert (received.numel, len(received), received.dtype) == (vector.numel, len(vector), dtype)
    assert torch.equal(received.indices, vector.indices)
    assert torch.equal(received.values, vector.values)
    assert vector.nbytes == received.nbytes == vector.pack().numel() == wire_nbytes(len(vector), dtype)


def test_bytes_are_a_header_and_8_or_12_an_entry():
    assert HEADER_BYTES == 32
    for dtype, entry in ((torch.float16, 8), (torch.bfloat16, 8), (torch.float32, 8), (torch.float64, 12)):
        assert wire_nbytes(7, dtype) == 32 + 7 * entry
        assert topk(torch.randn(50).to(dtype), 7).pack().shape == (32 + 7 * entry,)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_is_copied(dtype):
    x = torch.randn(1000, dtype=dtype)
    selected = topk(x, 11)
    kept, cut = merge(selected, topk(-x.flip(0), 11), 11)
    for vector in (selected, kept, cut, SparseVector(int32(2), torch.ones(1, dtype=dtype), 3)):
        buffer = vector.pack()
        assert buffer.data_ptr() == vector.pack().data_ptr()
        assert vector.values.data_ptr() == buffer.data_ptr() + HEADER_BYTES
        assert vector.indices.data_ptr() == vector.values.data_ptr() + len(vector) * dtype.itemsize
        received = SparseVector.unpack(buffer)
        assert received.pack().data_ptr() == buffer.data_ptr()
        assert received.values.data_ptr() == vector.values.data_ptr()
        assert received.indices.data_ptr() == vector.indices.data_ptr()


def test_header_layout_and_slot():
    buffer = topk(torch.tensor([5.0, 0.0, -7.0]), 2).pack()
    assert buffer[:HEADER_BYTES].view(torch.int64).tolist() == [0, 0, 3, 2 | 1 << 32]
    assert buffer[HEADER_BYTES : HEADER_BYTES + 8].view(torch.float32).tolist() == [5, -7]
    assert buffer[HEADER_BYTES + 8 :].view(torch.int32).tolist() == [0, 2]
    buffer[:16] = 255
    assert SparseVector.unpack(buffer).to_dense().tolist() == [5, 0, -7]


def test_packing_again_leaves_the_slot_alone():
    sparse = SparseVector(torch.tensor([2], dtype=torch.int32), torch.ones(1), 5)
    sparse.pack()[:16] = 7
    assert sparse.pack()[:16].eq(7).all()


@pytest.mark.parametrize("offset", [4, 8, 1])
def test_unpack_from_a_slice(offset):
    buffer = topk(torch.tensor([5.0, 0.0, -7.0], dtype=torch.float64), 1).pack()
    longer = torch.zeros(offset + len(buffer), dtype=torch.uint8)
    longer[offset:] = buffer
    received = SparseVector.unpack(longer[offset:])
    assert received.to_dense().tolist() == [0, 0, -7]
    assert (received.pack().data_ptr() == longer.data_ptr() + offset) == (offset == 8)


def corrupted(word, value):
    buffer = topk(torch.ones(5), 2).pack()
    buffer[: 8 * 4].view(torch.int64)[word] = value
    return buffer


@pytest.mark.parametrize(
    ("buffer", "message"),
    [
        (corrupted(2, 1), "2 entries of 1 elements"),
        (corrupted(2, -5), "of -5 elements"),
        (corrupted(2, MAX_NUMEL + 1), "elements"),
        (corrupted(3, 3 | 1 << 32), "3 torch.float32 entries take 56"),
        (corrupted(3, 2 | 2 << 32), "take 56"),
        (corrupted(3, 2 | 7 << 32), "dtype code 7"),
        (corrupted(3, 2), "dtype code 0"),
        (corrupted(3, -1), "dtype code -1"),
        (topk(torch.ones(5), 2).pack()[:-4], "44 bytes"),
        (torch.zeros(31, dtype=torch.uint8), "31 bytes"),
    ],
)
def test_corrupted_messages(buffer, message):
    with pytest.raises(ValueError, match=message):
        SparseVector.unpack(buffer)


@pytest.mark.parametrize("like", [SparseVector.empty(6), SparseVector.empty(5, torch.float64)])
def test_unexpected_messages(like):
    with pytest.raises(ValueError, match=f"expected {like.numel} of {like.dtype}"):
        SparseVector.unpack(topk(torch.ones(5), 2).pack(), like=like)


@pytest.mark.parametrize("buffer", [torch.zeros(40), torch.zeros(5, 8).byte(), torch.zeros(80).byte()[::2]])
def test_unpack_takes_flat_bytes(buffer):
    with pytest.raises(TypeError, match="uint8"):
        SparseVector.unpack(buffer)


def test_like_reads_nothing_back_from_a_device():
    """Meta tensors have no data: reading any would raise."""
    like = SparseVector.allocate(0, 100, torch.float64, torch.device("meta"))
    received = SparseVector.unpack(torch.empty(32 + 12 * 5, dtype=torch.uint8, device="meta"), like=like)
    assert (received.numel, len(received), received.dtype) == (100, 5, torch.float64)
    with pytest.raises(ValueError, match="no whole number"):
        SparseVector.unpack(torch.empty(33, dtype=torch.uint8, device="meta"), like=like)


@pytest.mark.parametrize(
    ("indices", "values", "numel", "error", "message"),
    [
        (torch.tensor([1]), torch.ones(1), 3, TypeError, r"to\(torch.int32\)"),
        (int32(1), torch.ones(1, dtype=torch.int32), 3, TypeError, "values are torch.int32"),
        (int32(1), torch.ones(2), 3, ValueError, "equally long"),
        (int32(1).view(1, 1), torch.ones(1, 1), 3, ValueError, "1-D"),
        (int32(2, 1), torch.ones(2), 3, ValueError, "increasing"),
        (int32(1, 1), torch.ones(2), 3, ValueError, "increasing"),
        (int32(1, 3), torch.ones(2), 3, ValueError, "0 … 2"),
        (int32(-1, 1), torch.ones(2), 3, ValueError, "from -1"),
        (int32(0), torch.ones(1), 2**31, ValueError, "split"),
        (int32(), torch.ones(0), -1, ValueError, "numel is -1"),
        (int32(0), torch.ones(1), 2.5, TypeError, "float"),
        (int32(0), torch.ones(1, device="meta"), 2, ValueError, "meta"),
    ],
)
def test_bad_input(indices, values, numel, error, message):
    with pytest.raises(error, match=message):
        SparseVector(indices, values, numel)


def test_the_constructor_copies_and_widens():
    values = torch.tensor([1.5, -2.0], dtype=torch.bfloat16)
    vector = SparseVector(int32(0, 4), values, 5)
    values.zero_()
    assert vector.dtype == torch.float32
    assert vector.to_dense().tolist() == [1.5, 0, 0, 0, -2]


def test_a_clone_is_a_copy():
    for vector in (topk(torch.randn(9), 3), SparseVector.empty(4, torch.float64)):
        copy = vector.clone()
        assert torch.equal(copy.pack(), vector.pack())
        copy.values.zero_()
        assert copy.dtype == vector.dtype
        assert not len(vector) or vector.values.any()


def test_largest_numel():
    vector = SparseVector(int32(0, MAX_NUMEL - 1), torch.ones(2), MAX_NUMEL)
    assert SparseVector.unpack(vector.pack()).indices.tolist() == [0, MAX_NUMEL - 1]


def test_empty():
    for dtype, wire_dtype in ((torch.float32, torch.float32), (torch.float16, torch.float32), (torch.float64,) * 2):
        vector = SparseVector.empty(3, dtype)
        assert (len(vector), vector.nbytes, vector.dtype) == (0, HEADER_BYTES, wire_dtype)
        assert SparseVector.unpack(vector.pack()).to_dense().tolist() == [0, 0, 0]
    with pytest.raises(TypeError, match="int64"):
        SparseVector.empty(3, torch.int64)


def test_repr_reads_no_data():
    text = repr(SparseVector.empty(7, torch.float64))
    assert text == "SparseVector(entries=0, numel=7, dtype=torch.float64, device=cpu)"


def test_saved_and_loaded_as_bytes():
    file = io.BytesIO()
    torch.save(topk(torch.tensor([1.0, 2.0]), 1).pack(), file)
    file.seek(0)
    assert SparseVector.unpack(torch.load(file, weights_only=True)).to_dense().tolist() == [0, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_saved_and_loaded_in_a_checkpoint(dtype):
    """Indices and values are views of one memory in two dtypes, which torch does not save."""
    file, vector = io.BytesIO(), topk(torch.tensor([1.0, 3.0, -2.0], dtype=dtype), 2)
    torch.save({"dropped": vector}, file)
    file.seek(0)
    with torch.serialization.safe_globals([unpacked]):
        loaded = torch.load(file, weights_only=True)["dropped"]
    assert torch.equal(loaded.pack(), vector.pack())


def test_copies_have_memory_of_their_own():
    """Also where the original is gone: kernels get addresses."""
    vector = topk(torch.arange(9.0), 3)
    for copied in (pickle.loads(pickle.dumps(vector)), copy.deepcopy(vector), vector.clone()):
        vector.values.fill_(0)
        assert merge(copied, copied, 3)[0].to_dense().sum() == 2 * (6 + 7 + 8)
        vector = copied
