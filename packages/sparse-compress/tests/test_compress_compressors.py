"""The laws of every compressor, on a literal table, and what is special to each."""

import io

import numpy as np
import pytest
import sparse_compress
import torch
from devices import every_device
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_compress import (
    ByParts,
    Compressor,
    DGCTopK,
    ErrorFeedback,
    GaussianK,
    RandomK,
    Selection,
    SparseVector,
    StatefulCompressor,
    Threshold,
    ThresholdReuse,
    TopK,
    WarmUp,
    clip_locally,
    concatenate,
    topk,
    vectors,
)
from sparse_compress.native.library import using
from sparse_compress.testing import check_compressor_laws

pytestmark = pytest.mark.quick

# A new compressor gets the laws by a line here: how to make it for n elements.
COMPRESSORS = {
    "TopK 0.1 %": lambda n: TopK(0.001),
    "TopK 30 %": lambda n: TopK(0.3),
    "TopK 100 %": lambda n: TopK(1),
    "RandomK": lambda n: RandomK(0.2, seed=3),
    "RandomK unbiased": lambda n: RandomK(0.2, unbiased=True),
    "Threshold": lambda n: Threshold(1.5, 0.3),
    "Threshold out of reach": lambda n: Threshold(1e30),
    "ThresholdReuse": lambda n: ThresholdReuse(0.1, every=3),
    "DGCTopK": lambda n: DGCTopK(0.05, sample=0.3),
    "GaussianK": lambda n: GaussianK(0.1),
    "ByParts": lambda n: ByParts(TopK(0.1), [n // 3, (n // 2, 1), n - n // 3 - n // 2]),
}
seeds = st.integers(0, 2**32 - 1)
sizes = st.integers(0, 400)

every_compressor = pytest.mark.parametrize("make", COMPRESSORS.values(), ids=COMPRESSORS)


def test_every_compressor_is_under_the_laws():
    offered = {
        kind for kind in vars(sparse_compress).values() if isinstance(kind, type) and issubclass(kind, Compressor)
    }
    protocols = {Compressor, StatefulCompressor}
    assert offered - protocols == {type(make(9)) for make in COMPRESSORS.values()}


@every_compressor
@pytest.mark.parametrize(
    "wrong", [[1.0, 2.0], torch.arange(9), torch.ones(9).to_sparse()], ids=["list", "int", "sparse"]
)
def test_what_is_no_dense_tensor_of_floats_is_named(make, wrong):
    with pytest.raises(TypeError, match=r"^tensor (is|has) "):
        make(9)(wrong)


@pytest.mark.slow
@every_compressor
def test_the_laws_for_compressors_of_ones_own(make):
    check_compressor_laws(make)


class Doubling(TopK):
    """Sends other values than those of the tensor."""

    def __call__(self, tensor, **named):
        return super().__call__(2 * tensor)


class Blind(TopK):
    """Makes 0 of what is not finite, and says that it finds it."""

    def __call__(self, tensor, **named):
        return super().__call__(tensor.nan_to_num(0, 0, 0))


class Lavish(TopK):
    """Sends more than it says."""

    def __call__(self, tensor, **named):
        return topk(tensor, self.entries(tensor.numel()) + 1)


class Shifted(TopK):
    """Gives its values to the elements beside theirs."""

    def __call__(self, tensor, **named):
        sent = super().__call__(tensor)
        return SparseVector(sent.indices.flip(0).neg().add(len(tensor) - 1), sent.values, len(tensor))


class Clearing(TopK):
    """Clears the tensor that it is given."""

    step = None

    def __call__(self, tensor, **named):
        sent = super().__call__(tensor)
        tensor.zero_()
        return sent


class Signs(TopK):
    """Sends signs and one scale."""

    step = None

    def __call__(self, tensor, **named):
        sent = super().__call__(tensor)
        return SparseVector(sent.indices, sent.values.sign() * sent.values.abs().mean(), tensor.numel())


class Mute(TopK):
    """Sends nothing."""

    step = None

    def __call__(self, tensor, **named):
        return SparseVector.empty(tensor.numel())


class Moving(TopK):
    """Keeps what its state does not hold."""

    step = None

    def __call__(self, tensor, **named):
        self.first = getattr(self, "first", 0) + 1
        return topk(tensor, 1 + self.first % 2)

    def entries(self, numel):
        return min(2, numel)


class Scalar(TopK):
    """Has a NumPy scalar in its state."""

    step, state = None, {"n": np.int64(3)}

    def __call__(self, tensor, *, name=""):
        return super().__call__(tensor)

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        pass


class Count(Scalar):
    state = 3


class AtLeastOne(TopK):
    """Says that it sends one of no elements."""

    def entries(self, numel):
        return max(1, super().entries(numel))


class Seldom(TopK):
    """Counts calls, which its state lacks, and sends more in every fourth one."""

    step = None

    def __call__(self, tensor, *, name=""):
        self.calls = getattr(self, "calls", 0) + 1
        return topk(tensor, 2 if (self.calls - 1) // 2 % 4 == 3 else 1)

    def entries(self, numel):
        return min(2, numel)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (Doubling(0.1), "values are not"),
        (Blind(0.1), "sends no NaN"),
        (Lavish(0.1), "at most 1"),
        (AtLeastOne(0.1), "of 0 elements: entries.. says 1, expected no more than there are"),
        (Shifted(0.1), "values are not"),
        (Clearing(0.1), "was changed"),
        (Mute(0.1), "sends nothing"),
        (Moving(0.1), "left a trace.*by chance, or keeps what its state_dict"),
        (Scalar(0.1), r"weights_only=True\) refuses the state"),
        (Count(0.1), "the state is 3, expected a dict"),
    ],
)
def test_the_laws_find_what_is_wrong(wrong, says):
    with pytest.raises(AssertionError, match=says):
        check_compressor_laws(lambda n: wrong)


def test_the_laws_find_a_state_that_is_not_saved():
    with pytest.raises(AssertionError, match=r"does not go on as the saved one.*state_dict.. lacks something"):
        check_compressor_laws(lambda n: Seldom(0.1))


@pytest.mark.parametrize("given", [TopK(0.1), lambda n: TopK, None])
def test_laws_of_a_compressor_in_place_of_what_makes_it(given):
    with pytest.raises(TypeError, match=r"make is (TopK.*|None), expected a function|is the class TopK"):
        check_compressor_laws(given)


def test_the_laws_hold_of_values_of_ones_own():
    check_compressor_laws(lambda n: Signs(0.1))


@pytest.mark.parametrize("level", ["plain", "avx512"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_what_was_sent_leaves_the_residual_whatever_its_values(level, momentum):
    feedback, gradient = ErrorFeedback(Signs(0.2), momentum=momentum), torch.randn(50)
    with using(level):
        sent = feedback.compress("w", gradient)
    assert torch.equal(feedback.residual("w"), gradient - sent.to_dense())
    assert not momentum or not feedback.state_dict()["velocities"]["w"][sent.indices.long()].any()


@pytest.mark.parametrize(
    ("compressor", "error", "says"),
    [
        (Clearing(0.1), ValueError, "Clearing.* changed the tensor of 'w'"),
        (type("Pair", (TopK,), {"step": None, "__call__": lambda *given: (1, 2)})(), TypeError, "returned tuple"),
        (
            type("None", (TopK,), {"entries": lambda *given: 0})(),
            ValueError,
            r"entries\(50\) is 0, expected k, 1 or more",
        ),
        (type("Half", (TopK,), {"entries": lambda *given: 0.5})(), TypeError, r"entries\(50\) is 0.5"),
        (type("Forgets", (TopK,), {"state_dict": dict})(), TypeError, "only one of state_dict and load_state_dict"),
        (type("Nameless", (Scalar,), {"__call__": lambda self, tensor: None})(), TypeError, "its call must take one"),
        (lambda tensor: topk(tensor, 1), TypeError, r"with entries\(numel\)"),
    ],
)
def test_error_feedback_refuses(compressor, error, says):
    with pytest.raises(error, match=says):
        ErrorFeedback(compressor).compress("w", torch.randn(50))


@pytest.mark.parametrize(("ours", "theirs"), [(RandomK(), ThresholdReuse()), (ThresholdReuse(), RandomK())])
def test_a_state_of_another_compressor_is_refused(ours, theirs):
    with pytest.raises(ValueError, match="the state has the keys"):
        ours.load_state_dict(theirs.state_dict())


def bits(sparse):
    return sparse.pack().cpu()


@pytest.mark.slow
@every_device
@every_compressor
@settings(max_examples=2 * settings.default.max_examples)
@given(seed=seeds, n=sizes, zero=st.booleans())
def test_what_is_sent(make, device, seed, n, zero):
    """Elements of the tensor, no more than stated, and not none unless all are zero."""
    compressor = make(n)
    x = torch.randn(n, generator=torch.Generator().manual_seed(seed)).to(device) * (not zero)
    before = x.clone()
    sparse = compressor(x)
    assert isinstance(compressor, Compressor)
    assert repr(compressor)
    assert torch.equal(x, before)
    assert len(sparse) <= compressor.entries(n) <= n
    assert len(sparse) or not x.any()
    assert torch.equal(sparse.indices, torch.unique(sparse.indices))
    if not getattr(compressor, "unbiased", False):
        assert torch.equal(sparse.values, x[sparse.indices.long()])


@pytest.mark.slow
@every_compressor
@settings(max_examples=settings.default.max_examples // 5)
@given(seed=seeds, n=st.integers(1, 2000))
def test_nasty_tensors(make, nasty, seed, n):
    compressor, x = make(n), torch.from_numpy(nasty(np.random.default_rng(seed), n))
    sparse = compressor(x)
    assert len(sparse) <= compressor.entries(n)
    assert len(sparse) or not x.any()
    if getattr(compressor, "finds_nonfinite", False):
        assert bool(sparse.values.isfinite().all()) == bool(x.isfinite().all())


@pytest.mark.slow
@pytest.mark.few(8)
@every_device
@every_compressor
@settings(max_examples=settings.default.max_examples)
@given(seed=seeds, n=sizes, tentative=st.booleans())
def test_sent_and_residual_are_what_was_accumulated(make, device, seed, n, tentative):
    compressor = make(n)
    if getattr(compressor, "unbiased", False):
        with pytest.raises(ValueError, match="unbiased=False"):
            ErrorFeedback(compressor)
        return
    feedback = ErrorFeedback(compressor, tentative=tentative)
    total = sent = torch.zeros(n, device=device)
    for step in range(5):
        gradient = torch.randint(-9, 10, (n,), generator=torch.Generator().manual_seed(seed + step)).float().to(device)
        total = total + gradient
        sent = sent + feedback.compress("w", gradient).to_dense()
        assert torch.equal(sent + feedback.residual("w"), total)
        feedback.commit()


@pytest.mark.slow
@every_compressor
@settings(max_examples=settings.default.max_examples)
@given(seed=seeds, n=sizes, outcomes=st.lists(st.booleans(), min_size=6, max_size=6))
def test_resumed_or_rolled_back_is_as_if_nothing_had_happened(make, seed, n, outcomes):
    """Two names in turns; steps that are rolled back leave no trace; a saved state goes on with the same bits."""
    if getattr(make(n), "unbiased", False):
        return
    plain, tentative = ErrorFeedback(make(n)), ErrorFeedback(make(n), tentative=True)
    x = torch.randn(6, n, generator=torch.Generator().manual_seed(seed))
    for gradient, good in zip(x, outcomes, strict=True):
        for name in ("a", "b"):
            one = tentative.compress(name, gradient)
            if good:
                assert torch.equal(bits(plain.compress(name, gradient)), bits(one))
        tentative.commit() if good else tentative.rollback()
        file = io.BytesIO()
        torch.save(tentative.state_dict(), file)
        file.seek(0)
        tentative = ErrorFeedback(make(n), tentative=True)
        tentative.load_state_dict(torch.load(file, weights_only=True))


@every_compressor
def test_names_know_nothing_of_each_other(make):
    if not isinstance(make(90), StatefulCompressor):
        return
    together, alone = make(90), make(90)
    x = torch.randn(5, 90, generator=torch.Generator().manual_seed(0))
    for gradient in x:
        together(10 * gradient, name="other")
        assert torch.equal(bits(together(gradient, name="w")), bits(alone(gradient, name="w")))


@every_compressor
@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_suspects(make, value):
    """Whatever is not finite is found, sent or not, and forgotten with the step."""
    n = 300
    if getattr(make(n), "unbiased", False):
        return
    for where in (0, 7, 299):
        feedback = ErrorFeedback(make(n), tentative=True)
        for name in ("good", "bad", "also good"):
            gradient = torch.randn(n, generator=torch.Generator().manual_seed(where))
            if name == "bad":
                gradient[where] = value
            feedback.compress(name, gradient)
        assert feedback.suspects() == ["bad"]
        feedback.compress("bad", torch.ones(n))  # again in the same step
        assert "bad" in feedback.suspects()
        feedback.rollback()
        assert feedback.suspects() == []
        feedback.compress("bad", torch.ones(n))
        assert feedback.suspects() == []


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_value_of_ones_own_that_is_not_finite_is_suspect(value):
    """It shows in the total, so all look for whose it is; the gradient was finite."""

    class Broken(RandomK):
        def __call__(self, tensor, *, name=""):
            sparse = super().__call__(tensor, name=name)
            sparse.values[0] = value
            return sparse

    feedback = ErrorFeedback(Broken(0.1))
    feedback.compress("w", torch.ones(50))
    assert feedback.suspects() == ["w"]


def test_a_prescribed_selection_does_not_hide_what_is_not_finite():
    feedback = ErrorFeedback(TopK(0.1))
    feedback.compress(
        "w", torch.tensor([torch.nan, 1.0]), select=lambda x: topk(x[1:], 0).allocate(0, 2, x.dtype, x.device)
    )
    assert feedback.suspects() == ["w"]


class EveryThird(Selection):
    finds_nonfinite = False

    def __call__(self, accumulated):
        indices = torch.arange(0, len(accumulated), 3)
        return vectors.of_entries(indices.int(), accumulated[indices], len(accumulated))


class ThirdsOfTopK(TopK):
    def __call__(self, tensor):
        return EveryThird()(tensor)


def test_a_selection_of_ones_own_does_not_hide_what_is_not_finite():
    feedback = ErrorFeedback(TopK(0.1))
    feedback.compress("w", torch.tensor([1.0, torch.nan]), select=EveryThird())
    assert feedback.suspects() == ["w"]


def test_a_call_of_ones_own_selects_in_place_of_the_step_it_inherits():
    sent = ErrorFeedback(ThirdsOfTopK(0.5)).compress("w", torch.arange(6.0))
    assert sent.indices.tolist() == [0, 3]


@pytest.mark.parametrize("stateful", [RandomK(), ThresholdReuse()])
def test_states_of_another_compressor(stateful):
    with pytest.raises(ValueError, match="another compressor"):
        ErrorFeedback(stateful).load_state_dict({"residuals": {}, "velocities": {}})
    with pytest.raises(ValueError, match="another compressor"):
        ErrorFeedback(TopK()).load_state_dict(ErrorFeedback(stateful).state_dict())


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("unbiased", [RandomK(0.1, unbiased=True), RandomK(0.3, unbiased=True, seed=5)], ids=repr)
@pytest.mark.parametrize("n", [10, 37])
def test_unbiased(unbiased, n):
    """The mean of 4,000 is within 6 standard errors, for every element."""
    x = torch.arange(1.0, n + 1)
    sent = torch.stack([unbiased(x).to_dense() for _ in range(4000)]).double()
    assert ((sent.mean(0) - x).abs() <= 6 * sent.std(0) / 4000**0.5 + 1e-9).all()


def test_random_k_is_a_matter_of_seed_name_and_call():
    x = torch.randn(1000)
    one, other = RandomK(0.05, seed=1), RandomK(0.05, seed=1)
    other(x, name="b")
    for call in range(3):
        sparse = one(x, name="a")
        assert torch.equal(sparse.indices, other(-x, name="a").indices)
        assert torch.equal(sparse.indices.long(), one.indices(1000, name="a", call=call))
    chosen = {tuple(RandomK(0.05, seed=seed).indices(1000, name=name, call=call).tolist())
              for seed in (0, 1) for name in "ab" for call in (0, 1)}  # fmt: skip
    assert len(chosen) == 8


@pytest.mark.parametrize("compressor", [TopK(0.01), RandomK(0.01), DGCTopK(0.01), GaussianK(0.01)], ids=repr)
@pytest.mark.parametrize(("numel", "entries"), [(0, 0), (1, 1), (149, 1), (151, 2), (10**6, 10**4)])
def test_entries(compressor, numel, entries):
    assert compressor.entries(numel) == entries
    assert TopK(1.0).entries(2**31 - 1) == 2**31 - 1


@pytest.mark.parametrize(("compressor", "share"), [(DGCTopK(0.01), 0.6), (GaussianK(0.01), 0.6)])
@pytest.mark.parametrize("name", ["normal", "heavy tails"])
def test_estimated_thresholds_find_most_of_the_entries(all_nasty, compressor, share, name):
    x = torch.from_numpy(all_nasty[name](np.random.default_rng(0), 200_000))
    assert share * 2000 <= len(compressor(x)) <= 2000


def test_threshold():
    x = torch.tensor([1.0, -2.0, 0.5, 3.0, -2.5])
    assert Threshold(2.0, 1.0)(x).indices.tolist() == [1, 3, 4]
    assert Threshold(2.0, 0.4)(x).indices.tolist() == [3, 4]
    assert Threshold(9.0, 1.0)(x).indices.tolist() == [3]
    assert len(Threshold(1e-9, 1.0)(torch.zeros(5))) == 0
    assert Threshold(2.0 + 1e-12, 1.0)(x).indices.tolist() == [3, 4]  # no float32 lies between: 2.0 is below


def test_threshold_reuse():
    reuse = ThresholdReuse(0.4, every=2)
    assert reuse(torch.tensor([1.0, -2.0, 0.5, 3.0, 0.0])).indices.tolist() == [1, 3]
    assert reuse(torch.tensor([1.0, -1.0, 0.5, 3.0, 1.9])).indices.tolist() == [3]
    assert reuse(torch.tensor([1.0, -1.0, 0.5, 3.0, 1.9])).indices.tolist() == [3, 4]


def test_by_parts_is_layer_wise_and_top_k_is_not():
    x = torch.tensor([9.0, 8.0, 7.0, 0.1, 0.2, 0.3])
    assert TopK(1 / 3)(x).indices.tolist() == [0, 1]
    assert ByParts(TopK(1 / 3), [3, (3, 1)])(x).indices.tolist() == [0, 5]
    with pytest.raises(ValueError, match="6 elements, but its parts 5"):
        ByParts(TopK(), [5])(x)
    with pytest.raises(TypeError, match="keeps state"):
        ByParts(RandomK(), [6])


def test_concatenate():
    parts = torch.randn(3, 20)
    whole = concatenate([topk(part, 4) for part in parts])
    assert torch.equal(whole.to_dense(), torch.cat([topk(part, 4).to_dense() for part in parts]))


def test_warm_up():
    def densities(schedule, steps):
        return [schedule(step) for step in range(steps)]

    assert densities(WarmUp(0.001, steps=4), 6) == [0.25, 0.0625, 0.015625, 0.004, 0.001, 0.001]
    assert densities(WarmUp(0.05, steps=4), 6) == [0.25, 0.25, 0.0625, 0.0625, 0.05, 0.05]
    assert densities(WarmUp(0.01, steps=2, stages=[1.0]), 4) == [1.0, 1.0, 0.01, 0.01]
    assert densities(WarmUp(0.5, steps=3), 4) == [0.5] * 4
    assert densities(WarmUp(0.0625, steps=4), 5) == [0.25] * 4 + [0.0625]  # a stage is above the density
    assert densities(WarmUp(0.01, steps=0), 2) == [0.01] * 2
    assert eval(repr(WarmUp(0.01, steps=9))) == WarmUp(0.01, steps=9)


def test_clip_locally():
    gradients = [torch.full((2, 2), 3.0), torch.tensor([8.0])]
    assert clip_locally(gradients, max_norm=10.0, ranks=4) == 10
    assert torch.stack([gradient.norm() for gradient in gradients]).norm().item() == pytest.approx(5)
    assert gradients[1].item() == pytest.approx(4)
    assert clip_locally(gradients, max_norm=10.0, ranks=4) == pytest.approx(5)
    assert gradients[1].item() == pytest.approx(4)


@pytest.mark.parametrize("gradient", [torch.full((4,), 6e4, dtype=torch.float16), torch.full((4,), 1e20)], ids=str)
def test_gradients_whose_norm_overflows_are_clipped_not_zeroed(gradient):
    norm = clip_locally([gradient], max_norm=1.0, ranks=1)
    assert norm.item() == pytest.approx(2e20 if gradient.dtype == torch.float32 else 1.2e5, rel=1e-3)
    assert gradient.float().norm().item() == pytest.approx(1, rel=1e-3)


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        ([torch.float32], torch.float32),
        ([torch.bfloat16], torch.bfloat16),
        ([torch.float16], torch.float32),
        ([torch.float16, torch.bfloat16], torch.float32),
        ([torch.float64], torch.float64),
        ([torch.complex64], torch.float32),
    ],
    ids=str,
)
def test_norms_that_do_not_overflow_are_not_taken_in_float64(dtypes, expected):
    gradients = [torch.full((4,), 4.0, dtype=dtype) for dtype in dtypes]
    norm = clip_locally(gradients, max_norm=1.0, ranks=1)
    assert norm.dtype == expected
    assert norm.item() == pytest.approx(8 * len(gradients) ** 0.5, rel=4e-3)
    assert [gradient.abs().float().norm().item() for gradient in gradients] == pytest.approx(
        [len(gradients) ** -0.5] * len(gradients), rel=4e-3
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.complex64], ids=str)
def test_nan_stays_nan(dtype):
    gradients = [torch.ones(2), torch.tensor([1.0, float("nan")]).to(dtype)]
    assert clip_locally(gradients, max_norm=1.0, ranks=1).isnan()
    assert all(gradient.isnan().all() for gradient in gradients)


def test_parameters_without_a_gradient_are_passed_over():
    gradient = torch.tensor([8.0])
    assert clip_locally([None, gradient, None], max_norm=2.0, ranks=1) == 8
    assert gradient.item() == pytest.approx(2)
    assert clip_locally([None], max_norm=2.0, ranks=1) == 0


@pytest.mark.parametrize("size", [0.0, 1e-7, 1e-6, 1e-3])
def test_small_gradients_are_clipped_as_torch_clips_them(size):
    ours, torchs = [torch.tensor([size])], torch.nn.Parameter(torch.zeros(1))
    torchs.grad = ours[0].clone()
    clip_locally(ours, max_norm=1e-6, ranks=1)
    torch.nn.utils.clip_grad_norm_([torchs], 1e-6)
    assert torch.equal(ours[0], torchs.grad)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        *((lambda density=density: TopK(density), "0 < density ≤ 1") for density in (0, -0.1, 1.001, float("nan"))),
        (lambda: Threshold(0.0), "threshold > 0"),
        (lambda: ThresholdReuse(every=0), "1 or more"),
        (lambda: DGCTopK(sample=0), "0 < sample ≤ 1"),
    ],
)
def test_bad_options(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("values", "entries"),
    [
        ([2.0, 2.0, 1.2], 2),  # two thirds of k are enough
        ([2.0, 1.2, 1.1], 3),  # one third is not
        ([4.0, 2.0, 2.0, 2.0], 3),  # four thirds are not too many: the first k of them
        ([4.0, 4.0, 2.0, 2.0, 2.0], 2),  # five thirds are
    ],
)
def test_gaussian_k_corrects_its_threshold_outside_two_and_four_thirds(values, entries, monkeypatch):
    monkeypatch.setattr(GaussianK, "_threshold", lambda self, flat: 2.0)
    tensor = torch.zeros(30)
    tensor[: len(values)] = torch.tensor(values)
    assert len(GaussianK(0.1)(tensor)) == entries
