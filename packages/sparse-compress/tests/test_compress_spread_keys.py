"""The k-th largest over ranks by the kernels against NumPy: the same keys, spans and counts."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from sparse_compress import spread_keys
from sparse_compress.native.library import LEVELS, kernels, using

MOST = 2**31 - 1


@pytest.fixture(scope="module", params=LEVELS)
def level(request):
    with using(request.param) as available:
        if not available:
            pytest.skip(f"{request.param} does not run here")
        assert kernels() is not None
        yield request.param


def both(level, call):
    """By NumPy, and by the kernels."""
    with using("plain"):
        expected = call()
    with using(level):
        return expected, call()


def keys_of(rng, count, kind):
    high = {"few": 3, "many": MOST, "tops": MOST}[kind]
    return np.sort(rng.integers(MOST - 2 if kind == "tops" else 0, high, count, dtype=np.int64, endpoint=True))


@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.integers(1, 9),
    longest=st.sampled_from([1, 40, 3000]),
    kind=st.sampled_from(["few", "many", "tops"]),
    data=st.data(),
)
def test_the_kernels_find_what_numpy_finds(level, seed, size, longest, kind, data):
    rng = np.random.default_rng(seed)
    given = [keys_of(rng, rng.integers(longest, endpoint=True), kind).astype(np.int32) for _ in range(size)]
    counts = [len(own) for own in given]
    k = data.draw(st.integers(1, max(sum(counts) - 1, 1)))
    samples = data.draw(st.integers(1, 60))
    rows = np.zeros((size, 1 + samples), np.int32)
    for row, own in zip(rows, given, strict=True):
        gap = max(-(-len(own) // samples), 1)
        row[0], row[1 : 1 + len(own) // gap] = len(own), own[len(own) % gap :: gap]
    sampled = torch.from_numpy(rows.reshape(-1))
    assume(sum(counts) > k)
    expected, found = both(level, lambda: spread_keys.bracket(sampled, counts, k))
    assert found == expected
    low, high, spans = found
    said = []
    for own, span in zip(given, spans, strict=True):
        one, other = both(level, lambda own=own, span=span: spread_keys.counted(torch.from_numpy(own), low, high, span))
        assert torch.equal(one, other)
        said.append(other)
    lengths = [len(numbers) for numbers in said]
    expected, found = both(level, lambda: spread_keys.find(torch.cat(said), lengths, low, high, k))
    assert found == expected
    assert found.key == np.sort(np.concatenate(given))[::-1][k - 1]


@given(seed=st.integers(0, 2**32 - 1), size=st.integers(1, 5), k=st.integers(1, 100), data=st.data())
def test_numbers_that_no_rank_should_give(level, seed, size, k, data):
    """Samples in any order; and whatever they are, spans lie within a rank's keys."""
    rng, samples = np.random.default_rng(seed), data.draw(st.integers(1, 20))
    rows = rng.integers(-MOST, MOST, (size, 1 + samples), dtype=np.int32)
    rows[:, 0] = counts = rng.integers(0, 400, size)
    if data.draw(st.booleans()):
        rows[:, 1:] &= MOST
    assume(sum(counts) > k)
    sampled = torch.from_numpy(rows.reshape(-1))
    expected, found = both(level, lambda: spread_keys.bracket(sampled, counts.tolist(), k))
    assert all(0 <= first <= last <= count for (first, last), count in zip(found.spans, counts, strict=True))
    if (rows >= 0).all():
        assert found == expected
    low, high = sorted(rng.integers(-1, MOST, 2).tolist())
    lengths = rng.integers(3, 40, size).tolist()
    numbers = torch.from_numpy(rng.integers(-MOST // 4, MOST // 4, sum(lengths), dtype=np.int32))
    expected, found = both(level, lambda: spread_keys.find(numbers, lengths, low, high, k))
    assert found == expected
