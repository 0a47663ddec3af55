"""Addition and merging against dense arithmetic, and the law kept + cut = a + b."""

from contextlib import contextmanager
from importlib import import_module

import numpy as np
import pytest
import torch
from devices import every_other_device
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_compress import SparseVector, add, add_all, merge, pad, share, topk
from sparse_compress.magnitude import largest, largest_on_device, magnitude_keys
from sparse_compress.vectors import compact

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("both_ways")]

DTYPES = st.sampled_from([torch.float32, torch.float64])
seeds = st.integers(0, 2**32 - 1)


def vector(entries, numel, dtype=torch.float32):
    """From {index: value}."""
    indices = torch.tensor(sorted(entries), dtype=torch.int32)
    return SparseVector(indices, torch.tensor([entries[i] for i in sorted(entries)], dtype=dtype), numel)


def entries_of(sparse):
    assert torch.equal(sparse.indices, torch.unique(sparse.indices)), "indices are not sorted and unique"
    return dict(zip(sparse.indices.tolist(), sparse.values.tolist(), strict=True))


@st.composite
def integer_pairs(draw):
    """Two vectors of small integers: their sums are exact, and full of ties, zeros and cancellations."""
    numel, dtype = draw(st.integers(0, 40)), draw(DTYPES)
    index, value = st.integers(0, max(numel - 1, 0)), st.integers(-4, 4).map(float)
    a, b = (draw(st.dictionaries(index, value, max_size=numel)) for _ in range(2))
    return vector(a, numel, dtype), vector(b, numel, dtype)


@settings(max_examples=10 * settings.default.max_examples)
@given(integer_pairs(), st.integers(0, 45))
def test_merge(pair, k):
    a, b = pair
    kept, cut = merge(a, b, k)
    total = {i: entries_of(a).get(i, 0) + entries_of(b).get(i, 0) for i in {*entries_of(a), *entries_of(b)}}
    best = sorted(total, key=lambda i: (-abs(total[i]), i))[:k]
    expected = {i: total[i] for i in best}
    for i in range(a.numel):  # explicit zeros at the lowest unused indices
        if len(expected) < min(k, a.numel):
            expected.setdefault(i, 0)
    assert entries_of(kept) == expected
    assert entries_of(cut) == {i: total[i] for i in total if i not in best}
    assert torch.equal(kept.to_dense() + cut.to_dense(), a.to_dense() + b.to_dense())
    assert kept.dtype == cut.dtype == a.dtype
    assert kept.numel == cut.numel == a.numel


@settings(max_examples=5 * settings.default.max_examples)
@given(seed=seeds, n=st.integers(1, 400), data=st.data())
def test_merge_commutes_bit_for_bit(seed, n, data):
    x = torch.randn(2, n, generator=torch.Generator().manual_seed(seed))
    x[x.abs() < 0.3] *= 0  # zeros of both signs
    k = data.draw(st.integers(0, n))
    a, b = topk(x[0], data.draw(st.integers(0, n))), topk(x[1], data.draw(st.integers(0, n)))
    for one, other in zip(merge(a, b, k), merge(b, a, k), strict=True):
        assert torch.equal(one.pack(), other.pack())


@settings(max_examples=settings.default.max_examples // 2)
@given(seed=seeds, n=st.integers(1, 20_000), data=st.data())
def test_merge_of_nasty_vectors(nasty, seed, n, data):
    """kept is what top-k makes of the dense sum, kept and cut share no index, and both hold the sum's values."""
    rng = np.random.default_rng(seed)
    k = data.draw(st.integers(1, n))
    a, b = topk(torch.from_numpy(nasty(rng, n)), k), topk(torch.from_numpy(nasty(rng, n)), k)
    kept, cut = merge(a, b, k)
    total = add(a, b)
    assert len(kept) == k
    assert len(kept) + len(cut) == len(total)
    merged = add(kept, cut)
    assert torch.equal(merged.indices, total.indices)
    assert torch.equal(merged.values.view(torch.int32), total.values.view(torch.int32))
    winners = total.indices[largest(magnitude_keys(total.values), k)]
    assert torch.equal(kept.indices, winners)
    assert torch.equal(total.to_dense().nan_to_num(1), (a.to_dense() + b.to_dense()).nan_to_num(1))


@contextmanager
def as_on_a_device():
    """Merging takes the ways that read nothing back."""
    module = import_module("sparse_compress.merge")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "kernels", lambda _: None)
        patched.setattr(module, "_picked", compact)
        patched.setattr(
            module, "largest", lambda keys, k: torch.isin(torch.arange(len(keys)), largest_on_device(keys, k))
        )
        yield


@settings(max_examples=8 * settings.default.max_examples)
@given(integer_pairs(), st.integers(0, 45))
def test_other_devices_give_the_same_padded_to_sizes_known_beforehand(pair, k):
    a, b = pair
    k, size = min(k, a.numel), min(len(a) + len(b), a.numel)
    if len(a) and len(b):
        with as_on_a_device():
            union = add(a, b)
        assert torch.equal(union.pack(), pad(add(a, b), size).pack())
        if k < len(a) + len(b):
            with as_on_a_device():
                kept, cut = merge(a, b, k)
            expected, expected_cut = merge(a, b, k)
            assert torch.equal(kept.pack(), expected.pack())
            assert torch.equal(cut.pack(), pad(expected_cut, size - k).pack())


def test_merging_reads_nothing_back_from_a_device():
    """Meta tensors have no data: reading any would raise."""
    a, b = (SparseVector.allocate(entries, 100, torch.float32, torch.device("meta")) for entries in (7, 5))
    assert [len(part) for k in (0, 5, 12, 30) for part in merge(a, b, k)] == [0, 12, 5, 7, 12, 0, 30, 0]
    assert [len(add(a, b)), len(pad(a, 9)), len(share(a, 1, 2))] == [12, 9, 3]


@pytest.mark.parametrize("size", range(1, 18))
def test_add_all(size):
    generator = torch.Generator().manual_seed(size)
    vectors = [topk(torch.randint(-4, 5, (40,), generator=generator).float(), 9) for _ in range(size)]
    total = add_all(vectors)
    assert torch.equal(total.to_dense(), sum(v.to_dense() for v in vectors))
    assert total.indices.tolist() == sorted({i for v in vectors for i in v.indices.tolist()})


def test_add_all_adds_neighbours_then_the_sums_of_neighbours():
    """Where order shows: 1 is lost beside 2^24, 2 is not; and which of two NaN payloads stays."""
    assert add_all([vector({0: value}, 1) for value in (2.0**24, 1, 1, 1)]).values.item() == 2.0**24 + 2
    a, b, c, d, e = (vector(dict.fromkeys(range(rank % 3, 4), 1.0), 4) for rank in range(5))
    for rank, one in enumerate((a, b, c, d, e)):
        one.values.view(torch.int32)[0] = 0x7FC00001 + rank
    assert torch.equal(add_all([a, b, c, d, e]).pack(), add(add(add(a, b), add(c, d)), e).pack())


def test_add_all_of_one_and_of_none():
    a = vector({0: -0.0, 2: 3.0}, 4)
    assert add_all([a]) is a
    with pytest.raises(ValueError, match="no vectors given, expected one or more"):
        add_all([])


def test_entries_survive_cancellation():
    total = add(vector({1: 2.0, 3: 1.0}, 5), vector({1: -2.0, 4: 1.0}, 5))
    assert entries_of(total) == {1: 0.0, 3: 1.0, 4: 1.0}


def test_an_operand_without_entries_changes_no_bit():
    a = vector({0: -0.0, 2: 3.0}, 4)
    for total in (add(a, SparseVector.empty(4)), add(SparseVector.empty(4), a)):
        assert torch.equal(total.pack(), a.pack())
    kept, cut = merge(a, SparseVector.empty(4), 1)
    assert (entries_of(kept), entries_of(cut)) == ({2: 3.0}, {0: 0.0})
    assert cut.values.signbit().item()


def test_non_finite_sums_are_kept():
    a, b = vector({0: torch.inf, 1: 5.0, 2: 9.0}, 3), vector({0: -torch.inf, 1: torch.inf}, 3)
    kept, cut = merge(a, b, 2)
    assert kept.indices.tolist() == [0, 1]
    assert kept.values.isnan().tolist() == [True, False]
    assert entries_of(cut) == {2: 9.0}


def test_published_counterexample():
    """Two shared non-zeros with sum [5, 7] and k = 3: a published merge gives [0, 7]."""
    kept, cut = merge(vector({0: 2.0, 1: 3.0}, 4), vector({0: 3.0, 1: 4.0}, 4), 3)
    assert entries_of(kept) == {0: 5.0, 1: 7.0, 2: 0.0}
    assert len(cut) == 0


@settings(max_examples=8 * settings.default.max_examples)
@given(integer_pairs(), st.data())
def test_pad(pair, data):
    a = pair[0]
    count = data.draw(st.integers(len(a), a.numel))
    padded = pad(a, count)
    unused = [i for i in range(a.numel) if i not in entries_of(a)]
    assert entries_of(padded) == entries_of(a) | dict.fromkeys(unused[: count - len(a)], 0.0)


def test_pad_of_a_vector_that_is_full_is_itself():
    a = vector({0: -0.0, 2: 3.0}, 4)
    assert pad(a, 2) is a
    assert padded_bits(pad(a, 4)) == [True, False, False, False]


def padded_bits(sparse):
    return sparse.values.signbit().tolist()


@pytest.mark.parametrize("count", [1, 5])
def test_pad_bounds(count):
    with pytest.raises(ValueError, match=f"count is {count}, expected 2"):
        pad(vector({0: 1.0, 2: 3.0}, 4), count)


@settings(max_examples=10 * settings.default.max_examples)
@given(integer_pairs(), st.integers(1, 9))
def test_shares_make_up_the_whole(pair, of):
    whole = pair[0]
    shares = [share(whole, member, of) for member in range(of)]
    for member, part in enumerate(shares):
        assert torch.equal(part.indices, whole.indices[member::of])
    total = SparseVector.empty(whole.numel, whole.dtype)
    for part in shares:
        total = add(total, part)
    assert torch.equal(total.pack(), whole.pack())


@pytest.mark.parametrize(("member", "of"), [(2, 2), (-1, 2), (0, 0)])
def test_share_bounds(member, of):
    with pytest.raises(ValueError, match=f"member {member} of {of}"):
        share(vector({0: 1.0}, 4), member, of)


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (SparseVector.empty(5), "numel"),
        (SparseVector.empty(4, torch.float64), "dtype"),
        (SparseVector.allocate(1, 4, torch.float32, torch.device("meta")), "device"),
    ],
)
def test_unlike_operands(other, what):
    for operation in (add, lambda a, b: merge(a, b, 1)):
        with pytest.raises(ValueError, match=f"unlike {what}"):
            operation(vector({0: 1.0}, 4), other)


def test_merge_bounds():
    a = vector({0: 1.0}, 4)
    with pytest.raises(ValueError, match="k is -1"):
        merge(a, a, -1)
    assert len(merge(a, a, 9)[0]) == 4


@every_other_device
def test_a_device_merges_to_the_same_bits(device):
    x = torch.randn(2, 100_000, generator=torch.Generator().manual_seed(0))
    a, b = topk(x[0], 1000), topk(x[1], 1000)
    on_gpu = [SparseVector.unpack(one.pack().to(device)) for one in (a, b)]
    for k in (1, 1000, 60_000):
        kept, cut = merge(a, b, k)
        gpu_kept, gpu_cut = merge(*on_gpu, k)
        assert torch.equal(gpu_kept.pack().cpu(), kept.pack())
        assert torch.equal(gpu_cut.pack().cpu(), pad(cut, len(gpu_cut)).pack())
