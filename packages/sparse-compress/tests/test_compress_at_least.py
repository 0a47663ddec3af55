"""Selection by a least magnitude, in one sweep."""

import pytest
import torch
from sparse_compress import topk
from sparse_compress.magnitude import magnitude_keys
from sparse_compress.selection import reaching

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("numel", [1, 7, 1000, 70001])
@pytest.mark.parametrize("least", [0.0, 2.0, 5.0, 6.0, torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_reaches_a_key_or_the_k_largest_of_it(numel, least, dtype):
    x = torch.randint(-5, 6, (numel,), generator=torch.Generator().manual_seed(numel)).to(dtype)
    x[numel // 2] = torch.nan
    key = int(magnitude_keys(torch.tensor(least, dtype=dtype)))
    positions = (magnitude_keys(x) >= key).nonzero().view(-1)
    for k in (1, (numel + 3) // 4, numel):
        found = reaching(x, key, k)
        expected = topk(x, k).indices if len(positions) > k else positions.int()
        assert torch.equal(found.indices, expected)
        assert torch.equal(found.values.isnan(), x[found.indices].isnan())
        assert torch.equal(found.values.nan_to_num(), x[found.indices].nan_to_num())
