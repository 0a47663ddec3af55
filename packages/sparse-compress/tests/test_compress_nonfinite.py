"""NaN and inf are found wherever they are, and nothing else is taken for them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sparse_compress import all_finite

pytestmark = pytest.mark.quick

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


@given(
    dtype=st.sampled_from(DTYPES),
    numel=st.integers(0, 300),
    largest=st.booleans(),
    bad=st.dictionaries(st.integers(0, 299), st.sampled_from([torch.inf, -torch.inf, torch.nan])),
)
def test_as_isfinite_says(dtype, numel, largest, bad):
    """Also where a sum overflows, or infinities cancel in it."""
    x = torch.full((numel,), torch.finfo(dtype).max if largest else 1.0, dtype=dtype)
    for at, value in bad.items():
        x[at:][:1] = value
    found = all_finite(x)
    assert (found.dtype, found.shape) == (torch.bool, ())
    assert bool(found) == bool(torch.isfinite(x).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_of_a_view(dtype):
    x = torch.ones(6, 4, dtype=dtype)
    x[:, 1] = torch.nan
    assert bool(all_finite(x[:, 2]))
    assert not bool(all_finite(x[2:, :2]))
