"""Messages that were damaged on their way: each is a valid vector or a ValueError, whatever their bytes are."""

from itertools import pairwise, product

import numpy as np
import pytest
import torch
from sparse_compress import MAX_NUMEL, DenseCodec, SparseVector, WireCodec, topk
from sparse_compress.codecs import elias_fano
from sparse_compress.codecs.rounding import VALUES

pytestmark = pytest.mark.quick

CODECS = [WireCodec(values, indices) for values, indices in product(VALUES, ("raw", "packed"))]
CASES = 1000
EDGES = (0, 1, 2, 3, 127, 128, 255)


def damaged(message, rng):
    """Bits flipped, bytes overwritten, cut, grown, exchanged, or a word of the header set to an extreme."""
    data = message.numpy().copy()
    kind = rng.integers(7)
    if kind == 0 and len(data):
        for at in rng.integers(len(data), size=rng.integers(1, 4)):
            data[at] ^= 1 << rng.integers(8)
    elif kind == 1 and len(data):
        at = rng.integers(len(data))
        data[at : at + rng.integers(1, 9)] = rng.choice(EDGES)
    elif kind == 2:
        data = data[: rng.integers(len(data) + 1)]
    elif kind == 3:
        data = np.concatenate([data, rng.integers(256, size=rng.integers(1, 40), dtype=np.uint8)])
    elif kind == 4 and len(data) >= 32:
        word = rng.choice([0, 1, -1, 2**31 - 1, 2**31, 2**32, -(2**31), 2**62, rng.integers(1, 99)])
        data[16:32].view(np.int64)[rng.integers(2)] = word
    elif kind == 5:
        data[len(data) // 2 :] = rng.integers(256, size=len(data) - len(data) // 2, dtype=np.uint8)
    elif len(data) >= 48:
        words = data[32 : len(data) // 4 * 4].view(np.int32)
        one, other = rng.integers(len(words), size=2)
        words[[one, other]] = words[[other, one]]
    return torch.from_numpy(data)


def check(vector, numel, entries=None):
    indices = vector.indices.tolist()
    assert all(a < b for a, b in pairwise(indices))
    assert not indices or (indices[0] >= 0 and indices[-1] < numel)
    assert vector.numel == numel
    assert len(vector) == len(vector.values) == len(indices)
    assert entries is None or len(indices) == entries
    assert vector.to_dense().shape == (numel,)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("known", [False, True])
def test_unpack(dtype, known):
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(CASES):
        numel = int(rng.integers(1, 60))
        vector = topk(torch.randn(numel, dtype=dtype), int(rng.integers(numel + 1)))
        message = damaged(vector.pack(), rng)
        try:
            got = SparseVector.unpack(message, like=SparseVector.empty(numel, dtype) if known else None)
        except ValueError:
            refused += 1
            continue
        if got.numel < 10**4:  # one that says it is larger may be so
            check(got, numel if known else got.numel)
    assert refused > CASES // 3


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_decode(codec):
    rng = np.random.default_rng(1)
    refused = 0
    for _ in range(CASES):
        numel = int(rng.integers(1, 60))
        entries = int(rng.integers(numel + 1))
        message = damaged(codec.encode(topk(torch.randn(numel), entries)), rng)
        known = entries if rng.random() < 0.5 else None
        try:
            check(codec.decode(message, numel, known), numel, known)
        except ValueError:
            refused += 1
    assert refused > CASES // 3


@pytest.mark.parametrize("values", VALUES)
def test_dense_codec(values):
    rng, codec = np.random.default_rng(2), DenseCodec(values)
    for _ in range(CASES // 10):
        numel = int(rng.integers(60))
        try:
            got = codec.decode(damaged(codec.encode(torch.randn(numel)), rng), numel)
        except ValueError:
            continue
        assert got.shape == (numel,)
        assert got.dtype == torch.float32


def test_elias_fano(monkeypatch):
    rng = np.random.default_rng(3)
    for _ in range(CASES):
        numel = int(rng.integers(1, 60))
        count = int(rng.integers(numel + 1))
        packed = elias_fano.pack(topk(torch.randn(numel), count).indices, numel)
        message = damaged(packed, rng)
        try:
            indices = elias_fano.unpack(message, numel, torch.empty(count, dtype=torch.int32))
        except ValueError:
            continue
        assert indices.dtype == torch.int32
        assert len(indices) == count
    monkeypatch.setattr(elias_fano, "kernels", lambda *_: None)
    monkeypatch.setattr(elias_fano, "_check_count", lambda *_: None)
    for _ in range(CASES // 10):  # as on a GPU, where nothing is looked at: wrong indices, but within the memory
        packed = torch.from_numpy(rng.integers(256, size=elias_fano.nbytes(50, 9), dtype=np.uint8))
        assert len(elias_fano.unpack(packed, 50, torch.empty(9, dtype=torch.int32))) == 9


def raw(indices, numel):
    """A packed vector with these indices, whatever they are."""
    vector = SparseVector.allocate(len(indices), numel, torch.float32, "cpu")
    vector.values.fill_(1)
    vector.indices.copy_(torch.tensor(indices, dtype=torch.int32))
    return vector


@pytest.mark.parametrize(
    ("indices", "says"),
    [
        ([2, 1], "increasing"),
        ([1, 1], "increasing"),
        ([-1, 1], "from -1 to 1"),
        ([1, 5], "from 1 to 5, expected 0 … 4"),
    ],
)
def test_indices_that_are_none(indices, says):
    vector = raw(indices, 5)
    with pytest.raises(ValueError, match=says):
        SparseVector.unpack(vector.pack())
    with pytest.raises(ValueError, match=says):
        WireCodec("bf16", "raw").decode(WireCodec("bf16", "raw").encode(vector), 5)


@pytest.mark.parametrize("codec", CODECS[:2], ids=repr)
def test_what_a_receiver_expects_is_checked_too(codec):
    message = codec.encode(topk(torch.randn(9), 3))
    for numel, entries in ((-1, None), (9, -1), (9, 10), (MAX_NUMEL + 1, 3)):
        with pytest.raises(ValueError, match="expected"):
            codec.decode(message, numel, entries)
    for numel, entries in ((9.0, None), (9, 3.0), (True, None)):
        with pytest.raises(TypeError, match="expected an integer"):
            codec.decode(message, numel, entries)
    for message in (b"123", torch.zeros(40), torch.zeros(80, dtype=torch.uint8)[::2]):
        with pytest.raises(TypeError, match="uint8"):
            codec.decode(message, 9, 3)
        with pytest.raises(TypeError, match="uint8"):
            DenseCodec().decode(message, 9)


def test_a_header_of_another_kind_of_value():
    message = WireCodec().encode(topk(torch.randn(9), 3))
    message[28] = 2
    with pytest.raises(ValueError, match=r"another codec than WireCodec.*, or damaged: code 0x10102, not 0x10101"):
        WireCodec().decode(message, 9, 3)


@pytest.mark.parametrize("entries", [3, None])
def test_bytes_of_another_codec_are_no_values(entries):
    message = WireCodec("bf16").encode(topk(torch.randn(9), 3))
    with pytest.raises(ValueError, match=r"another codec than WireCodec\(values='fp16'"):
        WireCodec("fp16").decode(message, 9, entries)


def test_a_scale_that_is_none():
    message = DenseCodec("int8").encode(torch.ones(3))
    message[:4].view(torch.int32)[0] = 128
    with pytest.raises(ValueError, match="2\\^128"):
        DenseCodec("int8").decode(message, 3)
