"""Buckets: nothing lost, order kept, one dtype each, no larger than asked."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from communicators import buckets_of
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.quick

shapes = st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), max_size=8)
dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])


@given(shapes=shapes, data=st.data(), nbytes=st.one_of(st.none(), st.integers(1, 200)))
def test_gather_then_scatter_gives_the_tensors_back(shapes, data, nbytes):
    tensors = [torch.randn(shape).to(data.draw(dtypes)) for shape in shapes]
    buckets = buckets_of(tensors, nbytes)
    assert sorted(position for bucket in buckets for position in bucket.members) == list(range(len(tensors)))
    copies = [torch.full_like(tensor, 9.0) for tensor in tensors]
    for bucket in buckets:
        flat = bucket.gather(tensors)
        assert flat.dtype == bucket.dtype
        assert flat.shape == (bucket.numel,)
        assert nbytes is None or len(bucket.members) == 1 or flat.numel() * flat.dtype.itemsize <= nbytes
        bucket.scatter(flat, copies)
    assert all(torch.equal(copy, tensor) for copy, tensor in zip(copies, tensors, strict=True))


def test_one_bucket_for_each_dtype_without_a_size():
    tensors = [torch.ones(3), torch.ones(2, dtype=torch.float64), torch.ones(1)]
    assert [bucket.members for bucket in buckets_of(tensors)] == [(0, 2), (1,)]


def test_missing_members_are_zeros():
    [bucket] = buckets_of([torch.ones(2), torch.ones(1)])
    out = torch.full((3,), 5.0)
    assert bucket.gather([None, torch.ones(1)], out=out) is out
    assert out.tolist() == [0.0, 0.0, 1.0]


def test_views_share_the_flat_tensor():
    [bucket] = buckets_of([torch.ones(2, 2), torch.ones(3)])
    flat = torch.zeros(7)
    bucket.views(flat)[1].fill_(2.0)
    assert flat.tolist() == [0.0] * 4 + [2.0] * 3


def test_members_that_lie_in_another_order():
    rows, columns = torch.arange(6.0).view(2, 3), torch.arange(6.0).view(2, 3).T.contiguous().T
    [plain] = buckets_of([rows, columns])
    strided = replace(plain, strides=(rows.stride(), columns.stride()))
    assert strided != plain
    flat = strided.gather([rows, columns])
    assert flat.tolist() == [0, 1, 2, 3, 4, 5, 0, 3, 1, 4, 2, 5]
    assert all(torch.equal(view, rows) for view in strided.views(flat))
    assert plain.gather([rows, columns]).tolist() == [0, 1, 2, 3, 4, 5] * 2


def test_wrong_size():
    with pytest.raises(ValueError, match="at least 1 byte"):
        buckets_of([torch.ones(1)], 0)
