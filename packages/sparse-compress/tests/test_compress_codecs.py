"""Wire codecs: rounded + error = x exactly, decode(encode(rounded)) = rounded, and sizes known beforehand."""

from itertools import product

import numpy as np
import pytest
import torch
from devices import every_device
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_compress import DenseCodec, ErrorFeedback, SparseVector, TopK, WireCodec, index_entropy, topk
from sparse_compress.codecs import elias_fano
from sparse_compress.codecs.rounding import VALUES, aligned
from sparse_compress.native.library import using

pytestmark = pytest.mark.quick

CODECS = [WireCodec(values, indices) for values, indices in product(VALUES, ("raw", "packed"))]
seeds = st.integers(0, 2**32 - 1)
values_of_any_kind = st.lists(
    st.floats(width=32) | st.sampled_from([0.0, -0.0, 65504.0, 65519.0, 65520.0, -1e6, 1e30, 3.4e38, 1e-40, 127.5]),
    max_size=30,
)
every_codec = pytest.mark.parametrize("codec", CODECS, ids=repr)


def bits(tensor):
    return tensor.view(torch.int32)


def spread(values, numel, seed):
    """Those values at random indices."""
    order = torch.randperm(numel, generator=torch.Generator().manual_seed(seed))[: len(values)]
    return SparseVector(order.sort().values.int(), torch.tensor(values, dtype=torch.float32), numel)


@pytest.mark.few(6)
@every_device
@every_codec
@settings(max_examples=2 * settings.default.max_examples)
@given(values=values_of_any_kind, more=st.integers(0, 300), seed=seeds)
def test_both_sides_hold_the_same_and_nothing_is_lost(device, codec, values, more, seed):
    vector = SparseVector.unpack(spread(values, len(values) + more, seed).pack().to(device))
    rounded, error = codec.split(vector)
    message = codec.encode(vector)
    assert message.shape == (codec.nbytes(len(vector), vector.numel),)
    assert torch.equal(codec.encode(rounded), message)
    again = codec.decode(message.clone(), vector.numel, len(vector))
    for part in (rounded, error, again):
        assert torch.equal(part.indices, vector.indices)
    assert torch.equal(bits(again.values), bits(rounded.values))
    finite = vector.values.isfinite()
    assert torch.equal(rounded.values.isfinite(), finite)
    assert torch.equal((rounded.values + error.values)[finite], vector.values[finite])
    assert error.values[~finite].eq(0).all()


@every_codec
@settings(max_examples=settings.default.max_examples // 5)
@given(seed=seeds, n=st.integers(1, 3000))
def test_nasty_vectors(codec, nasty, seed, n):
    vector = topk(torch.from_numpy(nasty(np.random.default_rng(seed), n)), n // 3)
    rounded, error = codec.split(vector)
    finite = vector.values.isfinite()
    assert torch.equal((rounded.values + error.values)[finite], vector.values[finite])
    assert torch.equal(codec.encode(rounded), codec.encode(vector))


@settings(max_examples=10 * settings.default.max_examples)
@given(numel=st.integers(0, 400) | st.integers(2**31 - 9, 2**31 - 1), data=st.data())
def test_elias_fano(numel, data):
    chosen = data.draw(st.sets(st.integers(0, numel - 1), max_size=min(numel, 60))) if numel else set()
    indices = torch.tensor(sorted(chosen), dtype=torch.int32)
    packed = elias_fano.pack(indices, numel)
    assert packed.shape == (elias_fano.nbytes(numel, len(indices)),)
    assert torch.equal(elias_fano.unpack(packed, numel, torch.empty_like(indices)), indices)
    with using("plain"):
        assert torch.equal(elias_fano.pack(indices, numel), packed)
        assert torch.equal(elias_fano.unpack(packed, numel, torch.empty_like(indices)), indices)


@pytest.mark.parametrize("indices", [range(700), range(300, 1000), [0], [999], range(0, 1000, 2), [0, 999]])
def test_elias_fano_of_extreme_sets(indices):
    indices = torch.tensor(list(indices), dtype=torch.int32)
    packed = elias_fano.pack(indices, 1000)
    assert torch.equal(elias_fano.unpack(packed, 1000, torch.empty_like(indices)), indices)


@pytest.mark.parametrize("density", [0.1, 0.01, 0.001, 0.0003])
def test_packed_indices_are_near_the_entropy_bound(density):
    n = 25_000_000
    k = round(n * density)
    spare = elias_fano.nbytes(n, k) / k - index_entropy(k, n)
    assert 0 < 8 * spare < 0.65


def test_nothing_is_read_back_from_a_device():
    """Meta tensors have no data: reading any would raise."""
    vector = SparseVector.allocate(10, 1000, torch.float32, torch.device("meta"))
    for codec in CODECS:
        rounded, error = codec.split(vector)
        assert len(rounded) == len(error) == 10


def test_float16_is_clamped_where_the_rest_is_exact():
    sent, error = DenseCodec("fp16").split(torch.tensor([65519.0, 65520.0, -1e6, 2.0**40, torch.inf]))
    assert sent.tolist() == [65504, 65504, -65504, 0, torch.inf]
    assert error.tolist() == [15, 16, -1e6 + 65504, 2.0**40, 0]


def test_int8_is_in_steps_of_a_power_of_two():
    sent, error = DenseCodec("int8").split(torch.tensor([100.0, -0.4, 0.6, 50.5, 1.5]))
    assert sent.tolist() == [100, 0, 1, 50, 2]
    assert (sent + error).tolist() == torch.tensor([100.0, -0.4, 0.6, 50.5, 1.5]).tolist()
    assert DenseCodec("int8").split(torch.tensor([127.9]))[0].tolist() == [127]


@pytest.mark.parametrize("values", VALUES)
@settings(max_examples=5 * settings.default.max_examples)
@given(x=values_of_any_kind)
def test_dense(values, x):
    codec, x = DenseCodec(values), torch.tensor(x, dtype=torch.float32)
    rounded, error = codec.split(x)
    assert codec.encode(x).shape == (codec.nbytes(len(x)),)
    assert torch.equal(bits(codec.decode(codec.encode(rounded), len(x))), bits(rounded))
    assert torch.equal((rounded + error)[x.isfinite()], x[x.isfinite()])


def test_bf16_halves_the_bytes():
    assert DenseCodec().nbytes(1000) == 2000
    x = torch.randn(4, 250)
    assert torch.equal(DenseCodec().split(x)[0], x.bfloat16().float().view(-1))


def test_with_error_feedback_nothing_is_lost():
    """The error goes back to the residual: sent + residual = accumulated, for integers exactly."""
    feedback, codec = ErrorFeedback(TopK(0.1)), WireCodec("int8")
    total = sent = torch.zeros(300)
    for step in range(6):
        gradient = torch.randint(-999, 999, (300,), generator=torch.Generator().manual_seed(step)).float()
        total = total + gradient
        rounded, error = codec.split(feedback.compress("w", gradient))
        feedback.restore("w", error)
        sent = sent + rounded.to_dense()
        assert torch.equal(sent + feedback.residual("w"), total)


def test_a_message_in_the_middle_of_another():
    codec, vector = WireCodec("int8"), topk(torch.randn(50), 7)
    message = codec.encode(vector)
    longer = torch.cat([torch.zeros(5, dtype=torch.uint8), message])
    for entries in (7, None):  # known, or as the header says
        assert torch.equal(codec.decode(longer[5:], 50, entries).pack(), codec.split(vector)[0].pack())
        assert torch.equal(codec.decode_block(message[16:], 50, entries).pack(), codec.split(vector)[0].pack())


def test_bad_input():
    codec, vector = WireCodec(), topk(torch.randn(50), 7)
    message = codec.encode(vector)
    with pytest.raises(ValueError, match=r"values='fp8'.*fp32"):
        WireCodec("fp8")
    with pytest.raises(ValueError, match="expected one of"):
        DenseCodec("fp8")
    with pytest.raises(ValueError, match="7 entries of 50 take"):
        codec.decode(message[:-4], 50, 7)
    with pytest.raises(ValueError, match="holds 7 entries of 50 elements, expected 7 of 49"):
        codec.decode(message, 49, 7)
    with pytest.raises(TypeError, match="float64"):
        codec.encode(topk(torch.randn(50, dtype=torch.float64), 7))
    with pytest.raises(TypeError, match="bfloat16"):
        DenseCodec().encode(torch.ones(3, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="3 elements take 6"):
        DenseCodec().decode(torch.zeros(5, dtype=torch.uint8), 3)


@pytest.mark.parametrize(("begins", "cut"), [(0, 0), (0, 2), (3, 0), (2, 2), (1, 3)])
def test_bytes_are_read_as_numbers_wherever_they_begin(begins, cut):
    """In memory, and in their storage, of which torch views no part that begins between two numbers."""
    data = torch.frombuffer(bytearray(range(32)), dtype=torch.uint8, offset=begins)[cut : cut + 16]
    found = aligned(data)
    assert (
        found.view(torch.int32).tolist() == np.frombuffer(bytes(range(begins + cut, begins + cut + 16)), "<i4").tolist()
    )
    assert found.data_ptr() % 4 == 0
