"""The dense sum in 8, 4 or 2 bits: conservation, agreement, worlds, bytes, and blocks that lose nothing."""

import math

import pytest
import torch
from communicators import SLOT_BYTES, CollectiveError, SimulatedWorld, run, testing
from communicators.schedules.quantised import (
    BITS,
    BLOCK,
    STEPS,
    packed,
    quantised_allreduce,
    quantised_nbytes,
    quantised_spans,
    unpacked,
)
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.quick

either = pytest.mark.parametrize("bits", BITS)
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@either
@given(st.lists(FLOATS, min_size=1, max_size=2100))
def test_what_is_sent_and_what_is_left_are_the_input_exactly(bits, values):
    x = torch.tensor(values, dtype=torch.float32)
    code = packed(x, bits)
    rounded = unpacked(code, len(x), bits)
    assert code.dtype == torch.int8
    assert len(code) == quantised_nbytes(len(x), bits) == -(-len(x) * bits // 8) + 2 * -(-len(x) // BLOCK)
    assert torch.equal((x - rounded).double() + rounded.double(), x.double())
    for block, rest in zip(x.split(BLOCK), (x - rounded).split(BLOCK), strict=True):
        largest = float(block.abs().max())
        most = largest / (2 ** (bits - 1) - 2) if bits > 2 else largest  # 2 bits clip
        assert largest > 1.7e38 or float(rest.abs().max()) <= max(most, 2.0**-127)
        assert float(rest.double().square().sum()) <= float(block.double().square().sum())


@either
@pytest.mark.parametrize("side", [1, -1])
def test_steps_of_the_scale_are_carried_exactly(bits, side):
    """Also where neighbours have unlike signs, and the number of elements is odd."""
    least, most = STEPS[bits]
    x = side * torch.cat([torch.arange(least, most + 1), torch.zeros(1)]) * 2.0**-9
    assert torch.equal(unpacked(packed(x, bits), len(x), bits), x)


@pytest.mark.parametrize(("bits", "scales"), [(8, 1), (4, 4), (2, 6)])
@given(st.integers(1, BLOCK), st.sampled_from([0.1, 1.0, 3.0]), st.integers(0, 99))
def test_the_scale_is_the_one_that_leaves_the_least(bits, scales, numel, spread, seed):
    """By trying each power of two, from the least that clips neither side downwards, with the larger side's sign."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=generator) * torch.exp(spread * torch.randn(numel, generator=generator))
    left = float((x - unpacked(packed(x, bits), numel, bits)).double().square().sum())
    largest, (least, most) = float(x[x.abs().argmax()]), STEPS[bits]
    highest = math.ceil(math.log2(abs(largest) / (most + 0.5)))
    powers = [math.copysign(2.0 ** (highest - halved), -largest) for halved in range(scales)]
    tried = [(x / power).round().clamp(least, most) * power for power in powers]
    assert left == pytest.approx(min(float((x - one).double().square().sum()) for one in tried), rel=1e-5)


@either
@pytest.mark.parametrize("size", [0.76, 0.99])
def test_elements_of_one_size_and_both_signs_lose_no_more_than_their_rounding(bits, size):
    """Such as first updates of Adam. The scale that clips nothing on the longer side alone clips all on the other."""
    x = size * torch.where(torch.arange(BLOCK) % 3 == 0, 1.0, -1.0)
    assert float((x - unpacked(packed(x, bits), BLOCK, bits)).abs().max()) <= 0.25


@either
@pytest.mark.parametrize("wrong", [torch.inf, -torch.inf, torch.nan])
def test_a_block_that_is_not_finite_is_nan_alone(bits, wrong):
    x = torch.ones(3000)
    x[1500] = wrong
    rounded = unpacked(packed(x, bits), 3000, bits)
    assert torch.equal(rounded.isnan(), (torch.arange(3000) // BLOCK) == 1)


@pytest.mark.few(2)
@either
@settings(max_examples=25)
@given(data=st.data())
def test_laws(bits, data):
    numels = st.one_of(st.integers(0, 60), st.integers(BLOCK - 2, 3 * BLOCK))
    inputs = data.draw(testing.inputs(dtype=torch.float32, sizes=testing.world_sizes(8), numels=numels))
    numel = len(inputs[0])
    inputs = [x * torch.where(torch.arange(numel) % 2 == 0, 1001.0, 1.0) for x in inputs]  # no 8 bits hold both
    testing.check_laws(
        lambda comm, x: run(quantised_allreduce(x, comm.rank, comm.size, bits=bits), comm),
        inputs,
        total=lambda rounded: rounded.total,
        dropped=lambda rounded: rounded.dropped,
        traffic=lambda rank, size: _sent(rank, size, numel, bits),
    )


def _sent(rank, size, numel, bits):
    """All spans but its own, then Bruck: round i forwards min(2^i, P − 2^i) blocks, from its own downwards."""
    sizes, sums = (
        [quantised_nbytes(high - low, one) for low, high in quantised_spans(numel, size)]
        for one in (bits, {8: 8, 4: 4, 2: 4}[bits])
    )
    nbytes, messages, distance = sum(sizes) - sizes[rank] + (size - 1) * SLOT_BYTES, size - 1, 1
    while distance < size:
        nbytes += SLOT_BYTES + sum(sums[(rank + i) % size] for i in range(min(distance, size - distance)))
        messages, distance = messages + 1, 2 * distance
    return nbytes, messages


@pytest.mark.parametrize(
    ("x", "bits", "error", "says"),
    [
        (torch.zeros(3), 3, ValueError, "bits is 3, expected one of"),
        (torch.zeros(3).double(), 8, TypeError, "float64"),
        (torch.zeros(3, 2), 8, TypeError, r"shape \(3, 2\)"),
    ],
)
def test_what_cannot_be_summed_is_refused(x, bits, error, says):
    with pytest.raises((error, CollectiveError), match=says):
        SimulatedWorld(2).run(lambda comm: run(quantised_allreduce(x, comm.rank, comm.size, bits=bits), comm))


@either
def test_a_default_of_few_bits_loses_nothing(bits):
    """Small numbers, which torch.float16 as the default dtype would not hold."""
    inputs = [torch.randint(-9, 10, (50,), dtype=torch.float32) * 2.0**-40 for _ in range(3)]
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        sums = SimulatedWorld(3).run(
            lambda comm: run(quantised_allreduce(inputs[comm.rank], comm.rank, 3, bits=bits), comm)
        )
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(sums[0].total + sum(each.dropped for each in sums), sum(inputs))
