"""The fused step of error feedback against its plain composition: the same bits."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sparse_compress import ErrorFeedback, TopK
from sparse_compress.selection import Largest, LargestOfBlocks, Reaching

pytestmark = pytest.mark.usefixtures("both_ways")

GRADIENT_DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


class Unfused:
    """TopK without its fused step."""

    def __init__(self, density):
        self.plain = TopK(density)

    def __call__(self, tensor):
        return self.plain(tensor)

    def entries(self, numel):
        return self.plain.entries(numel)


class Plain:
    """A prescribed selection without its fused step."""

    def __init__(self, selection):
        self.selection = selection

    def __call__(self, accumulated):
        return self.selection(accumulated)


def bits(tensor):
    return tensor.view(torch.int64 if tensor.dtype == torch.float64 else torch.int32)


def assert_steps_agree(gradients, density, select=None, **mode):
    """Sent, residuals and velocities are the same bits; NaN by its bits too.

    But for NaN of 16 bits, which are tested as infinities: torch converts those in a vector and those left over to
    other ones, and so others are the largest. And none is added to another: which of them stays depends on the place.
    """
    fused, plain = ErrorFeedback(TopK(density), **mode), ErrorFeedback(Unfused(density), **mode)
    for gradient in gradients:
        if gradient.dtype.itemsize == 2:
            gradient = gradient.nan_to_num(torch.inf, torch.inf, -torch.inf)
        known = fused._known.get("w")
        if known is not None:
            gradient = torch.where(known.residual.isnan(), 0, gradient)
        sent = fused.compress("w", gradient, select=select)
        expected = plain.compress("w", gradient, select=None if select is None else Plain(select))
        assert torch.equal(sent.indices, expected.indices)
        assert torch.equal(bits(sent.values), bits(expected.values))
        assert fused.suspects() == plain.suspects()
        for one, other in zip(fused._known["w"].flat(), plain._known["w"].flat(), strict=True):
            assert torch.equal(bits(one), bits(other))
        fused.commit()
        plain.commit()


@pytest.mark.few(40)
@pytest.mark.parametrize("dtype", GRADIENT_DTYPES)
@settings(max_examples=settings.default.max_examples // 5)
@given(
    seed=st.integers(0, 2**32 - 1),
    n=st.integers(1, 300) | st.integers(8_000, 200_000),
    momentum=st.sampled_from([0.0, 0.7]),
    tentative=st.booleans(),
)
def test_fused_is_plain(nasty, dtype, seed, n, momentum, tentative):
    rng = np.random.default_rng(seed)
    gradients = [torch.from_numpy(nasty(rng, n)).to(dtype) for _ in range(2)]
    assert_steps_agree(gradients, 0.01, momentum=momentum, tentative=tentative)


def selections(n, k, key):
    """Of all kinds, for n elements; blocks with and without a budget, and an empty one."""
    a, b = n // 3, n // 2
    blocks = LargestOfBlocks([(0, a), (a, b), (b, b), (b, n)], [min(k, a), 0, 0, min(k, n - b)])
    return [Largest(k), Reaching(key, k), Reaching(0, k), Reaching(2**31 - 1, k), blocks]


@pytest.mark.few(40)
@pytest.mark.parametrize("which", range(5))
@settings(max_examples=settings.default.max_examples // 3)
@example(seed=524709, n=41744, dtype=torch.float16, momentum=0.0, tentative=False)
@given(
    seed=st.integers(0, 2**32 - 1),
    n=st.integers(1, 300) | st.integers(8_000, 100_000),
    dtype=st.sampled_from(GRADIENT_DTYPES),
    momentum=st.sampled_from([0.0, 0.7]),
    tentative=st.booleans(),
)
def test_prescribed_selections_fused_are_plain(nasty, which, seed, n, dtype, momentum, tentative):
    rng = np.random.default_rng(seed)
    gradients = [torch.from_numpy(nasty(rng, n)).to(dtype) for _ in range(2)]
    key = int(torch.tensor(2.0).view(torch.int32))
    select = selections(n, max(n // 50, 1), key)[which]
    assert_steps_agree(gradients, 0.5, select, momentum=momentum, tentative=tentative)


def test_prescribed_selections_of_views_and_with_spans_withheld():
    x = torch.randn(600, 400, generator=torch.Generator().manual_seed(0))
    for select in selections(x.numel(), 1000, int(torch.tensor(2.0).view(torch.int32))):
        assert_steps_agree([x.T, x.T], 0.5, select)
        feedback = ErrorFeedback(TopK(0.5))
        gradient = x.clone()
        gradient[:2] = 0
        sent = feedback.compress("w", gradient, select=select, withhold=[slice(0, 800)])
        assert torch.equal(sent.pack(), select(gradient.view(-1)).pack())


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", [0, 40_000, 99_999])
def test_prescribed_selections_find_what_is_not_finite(value, where):
    """Wherever it lies: in a block without a budget too."""
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    for select in selections(len(x), 10, int(torch.tensor(4.5).view(torch.int32))):
        feedback = ErrorFeedback(TopK(0.5))
        feedback.compress("w", x.index_fill(0, torch.tensor([where]), value), select=select)
        assert feedback.suspects() == ["w"]


def test_numbers_of_numpy_are_numbers():
    class Mine(TopK):
        def entries(self, numel):
            return np.int64(5)

    gradient, edges = torch.randn(50), np.array([0, 20, 50])
    assert len(ErrorFeedback(Mine(0.1)).compress("w", gradient)) == 5
    bounds, budgets = list(pairwise(edges)), np.diff(edges) // 10
    for select, k in (
        (Largest(np.int64(5)), 5),
        (Reaching(np.int64(1), np.int64(5)), 5),
        (LargestOfBlocks(bounds, budgets), 5),
    ):
        assert len(ErrorFeedback(TopK(0.1)).compress("w", gradient, select=select)) == k


def test_gradients_that_are_views():
    x = torch.randn(600, 400, generator=torch.Generator().manual_seed(0))
    for view in (x.T, x[::2], x[:, 7:], x[1:, :3].T, x.view(-1)[1:]):
        assert_steps_agree([view, view.bfloat16()], 0.01, momentum=0.5)


def test_the_sum_is_complete_when_the_sample_misleads():
    """A kernel gives its first selection up half-way, but not its writing."""
    x = torch.ones(1_300_000)
    feedback = ErrorFeedback(TopK(0.001))
    sent = feedback.compress("w", x)
    assert torch.equal(sent.to_dense() + feedback.residual("w"), x)
