"""Packing by the compiled kernels against NumPy and torch, at every level: the same bytes, and none beyond them."""

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_compress import WireCodec, topk
from sparse_compress.codecs import elias_fano
from sparse_compress.codecs.rounding import VALUES, leftover
from sparse_compress.native.library import using

pytestmark = pytest.mark.quick

seeds = st.integers(0, 2**32 - 1)
lengths = st.integers(0, 70) | st.integers(0, 5000)
EDGES = np.float32([0.0, -0.0, 65504, 65519, 65520, -1e6, 1e30, -3.4e38, 3.39e38, 1e-40, 6e-8, 2.9e-8, 127.5, np.inf])
GUARD, POISON = 64, 0xA5


def both(level, call):
    """The results in NumPy and by the kernels; of theirs all new memory is poisoned."""
    with using("plain"):
        expected = call()
    with using(level), pytest.MonkeyPatch.context() as patched:
        blocks = []
        patched.setattr(torch, "empty", lambda size, *, dtype, device="cpu": guarded(blocks, size, dtype))
        found = call()
    assert all((block[-GUARD:] == POISON).all() for block in blocks)
    return expected, found


def guarded(blocks, size, dtype):
    """Poison, and more of it behind, which must stay."""
    block = torch.full((size * dtype.itemsize + GUARD,), POISON, dtype=torch.uint8)
    blocks.append(block)
    return block[: size * dtype.itemsize].view(dtype)


def as_bytes(x):
    return x.contiguous().view(torch.uint8)


def moved(x, offset):
    """The same elements, not to be written, at an address that may be no multiple of their width."""
    memory = np.zeros(x.nbytes + offset, np.uint8)
    out = memory[offset:].view(x.dtype)
    out[:] = x
    out.flags.writeable = False
    with warnings.catch_warnings(action="ignore"):  # torch says that writing would be an error
        return torch.from_numpy(out)


@pytest.mark.few(24)
@pytest.mark.parametrize("kind", ["bf16", "int8"])
@given(seed=seeds, n=lengths, offset=st.integers(0, 3))
def test_values(level, nasty, kind, seed, n, offset):
    rng = np.random.default_rng(seed)
    x = moved(np.concatenate([nasty(rng, n + 1)[1:], rng.choice(EDGES, n % 7)]), offset)
    values = VALUES[kind]
    expected, packed = both(level, lambda: values.pack(x))
    assert torch.equal(as_bytes(packed), as_bytes(expected))
    unpacked = both(level, lambda: values.unpack(expected, torch.empty(len(x), dtype=torch.float32)))
    assert torch.equal(*map(as_bytes, unpacked))
    errors = both(level, lambda: leftover(x, unpacked[0], torch.empty(len(x), dtype=torch.float32)))
    assert torch.equal(*map(as_bytes, errors))


@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_whatever_two_bytes_say(level, kind):
    """Also what nobody packs: another rank may send it."""
    data = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.uint8)
    data[:8] = torch.tensor([-7, 0], dtype=torch.int32).view(torch.uint8)
    unpacked = both(level, lambda: VALUES[kind].unpack(data, torch.empty(30_000, dtype=torch.float32)))
    assert torch.equal(*map(as_bytes, unpacked))


@settings(max_examples=3 * settings.default.max_examples)
@given(seed=seeds, numel=lengths | st.just(2**31 - 1) | st.integers(1, 2**20), data=st.data())
def test_indices(level, seed, numel, data):
    count = data.draw(st.integers(0, min(numel, 3000)) | st.integers(0, min(numel, 20)))
    chosen = np.random.default_rng(seed).choice(numel, 2 * count) if numel else np.empty(0, np.int64)
    indices = moved(np.unique(chosen)[:count].astype(np.int32), seed % 4)
    expected, packed = both(level, lambda: elias_fano.pack(indices, numel))
    assert torch.equal(packed, expected)
    again = moved(packed.numpy(), seed % 4)
    unpacked = both(level, lambda: elias_fano.unpack(again, numel, torch.empty(len(indices), dtype=torch.int32)))
    assert torch.equal(*unpacked)


@given(seed=seeds, numel=st.integers(1, 3000), data=st.data())
def test_corrupted_indices(level, seed, numel, data):
    """The same indices, or the same words, and nothing is written that there is no room for."""
    count = data.draw(st.integers(1, numel))
    rng = np.random.default_rng(seed)
    packed = torch.from_numpy(rng.integers(0, 256, elias_fano.nbytes(numel, count)).astype(np.uint8))
    expected, found = both(level, lambda: outcome(packed, numel, count))
    assert expected == found


def outcome(packed, numel, count):
    try:
        return elias_fano.unpack(packed, numel, torch.empty(count, dtype=torch.int32)).tolist()
    except ValueError as error:
        return str(error)


@pytest.mark.few(103)
@pytest.mark.parametrize("values", VALUES)
def test_messages_of_many_entries(level, nasty, values):
    rng = np.random.default_rng(0)
    codec, n = WireCodec(values), 70_001
    vector = topk(torch.from_numpy(nasty(rng, n)), n // 9)
    for call in (lambda: codec.encode(vector), lambda: codec.split(vector)[1].pack()):
        with using("plain"):
            expected = call()
        with using(level):
            assert torch.equal(call(), expected)
