"""Error feedback: sent + residual = accumulated, with momentum, tentative steps and saved states."""

import copy
import io

import pytest
import torch
from devices import every_other_device
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_compress import ErrorFeedback, SparseVector, TopK, topk, vectors

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("both_ways")]

seeds = st.integers(0, 2**32 - 1)
modes = st.fixed_dictionaries({"momentum": st.sampled_from([0.0, 0.5]), "tentative": st.booleans()})
GRADIENT_DTYPES = st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64])


def integers(shape, seed, dtype=torch.float32):
    """Integer-valued gradients: their sums are exact."""
    return torch.randint(-9, 10, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def state_bits(feedback):
    """Copies of all residuals and velocities."""
    state = feedback.state_dict()
    return {(part, name): tensor.clone() for part in state for name, tensor in state[part].items()}


def assert_same_bits(one, other):
    assert one.keys() == other.keys()
    for key, tensor in one.items():
        assert torch.equal(tensor.view(torch.int32), other[key].view(torch.int32)), key


@settings(max_examples=7 * settings.default.max_examples)
@given(seeds, st.integers(0, 50), st.floats(0.01, 1), GRADIENT_DTYPES, st.booleans())
def test_sent_and_residual_are_what_was_accumulated(seed, n, density, dtype, tentative):
    feedback = ErrorFeedback(TopK(density), tentative=tentative)
    accumulated = sent = torch.zeros(n, dtype=torch.float64)
    for step in range(4):
        gradient = integers((n,), seed + step, dtype)
        accumulated = accumulated + gradient
        sparse = feedback.compress("w", gradient)
        assert len(sparse) == TopK(density).entries(n)
        sent = sent + sparse.to_dense()
        assert torch.equal(sent + feedback.residual("w"), accumulated)
        dropped = topk(sparse.to_dense(), n // 3)
        feedback.restore("w", dropped)
        sent = sent - dropped.to_dense()
        assert torch.equal(sent + feedback.residual("w"), accumulated)
        feedback.commit()


@settings(max_examples=7 * settings.default.max_examples)
@given(seeds, st.integers(1, 50), st.floats(0.01, 1), st.booleans())
def test_momentum_correction_follows_its_equations(seed, n, density, tentative):
    feedback = ErrorFeedback(TopK(density), momentum=0.5, tentative=tentative)
    u = v = torch.zeros(n)
    for step in range(4):
        gradient = torch.randn(n, generator=torch.Generator().manual_seed(seed + step))
        u = 0.5 * u + gradient
        v = v + u
        expected = topk(v, TopK(density).entries(n))
        sparse = feedback.compress("w", gradient)
        assert torch.equal(sparse.pack(), expected.pack())
        if len(expected) < n:
            u[expected.indices.long()] = 0
        v[expected.indices.long()] = 0
        dropped = topk(sparse.to_dense(), 1)
        v = v + dropped.to_dense()
        feedback.restore("w", dropped)
        feedback.commit()
        assert torch.equal(feedback.residual("w"), v)
        assert torch.equal(feedback.state_dict()["velocities"]["w"], u)


@pytest.mark.parametrize("n", [1, 7, 400])
@pytest.mark.parametrize("withhold", [[], [slice(0, 1)]])
@pytest.mark.parametrize("select", [None, lambda flat: topk(flat, len(flat))])
def test_where_all_is_sent_momentum_is_as_without_compression(n, withhold, select):
    """It was no momentum at all: nothing waits then, so nothing is to be masked."""
    feedback, velocity = ErrorFeedback(TopK(1.0), momentum=0.5), torch.zeros(n)
    for step in range(4):
        gradient = integers((n,), step)
        for span in withhold:
            gradient[span] = 0
        velocity = 0.5 * velocity + gradient
        sent = feedback.compress("w", gradient, select=select, withhold=withhold).to_dense()
        assert torch.equal(sent, velocity)
        assert not feedback.residual("w").any()


def test_where_all_is_sent_what_is_not_finite_leaves_nothing():
    feedback = ErrorFeedback(TopK(1.0), momentum=0.5)
    for value in (2.0, float("inf"), float("nan")):
        feedback.compress("w", torch.tensor([4.0, value]))
    assert feedback.compress("w", torch.zeros(2)).to_dense().tolist() == [3.5, 0.0]


def test_residual_is_kept_in_float32_and_in_the_gradients_shape():
    feedback = ErrorFeedback(TopK(0.5))
    gradient = torch.tensor([[1.0, 2.0**-9], [4.0, 5.0]], dtype=torch.bfloat16)
    for _ in range(3):
        sparse = feedback.compress("w", gradient.T)
    assert (sparse.dtype, sparse.numel) == (torch.float32, 4)
    assert feedback.residual("w").tolist() == [[3, 0], [3 * 2.0**-9, 0]]
    assert gradient.tolist() == [[1, 2.0**-9], [4, 5]]


def test_steps_reuse_their_memory():
    for tentative in (False, True):
        feedback = ErrorFeedback(TopK(0.1), momentum=0.9, tentative=tentative)
        addresses = set()
        for step in range(6):
            feedback.compress("w", integers((100,), step))
            addresses.add(feedback.residual("w").data_ptr())
            feedback.commit()
        assert len(addresses) == 1 + tentative


def test_select_takes_the_compressors_place():
    def last_two(accumulated):
        assert accumulated.shape == (6,)
        return SparseVector(torch.tensor([4, 5], dtype=torch.int32), accumulated[4:], 6)

    feedback = ErrorFeedback(TopK(0.5))
    sparse = feedback.compress("w", torch.arange(6.0).view(2, 3), select=last_two)
    assert sparse.to_dense().tolist() == [0, 0, 0, 0, 4, 5]
    assert feedback.residual("w").flatten().tolist() == [0, 1, 2, 3, 0, 0]


@pytest.mark.parametrize("wrong", [SparseVector.empty(5), SparseVector.empty(6, torch.float64)])
def test_selection_of_something_else(wrong):
    with pytest.raises(ValueError, match=r"selection for 'w' .* expected numel=6, dtype=torch.float32"):
        ErrorFeedback(TopK(0.5)).compress("w", torch.ones(6), select=lambda accumulated: wrong)


@pytest.mark.parametrize("indices", [[2, 1], [1, 1], [-1, 2], [0, 6]])
def test_selection_of_indices_that_are_none(indices):
    wrong = vectors.of_entries(torch.tensor(indices, dtype=torch.int32), torch.ones(2), 6)
    with pytest.raises(ValueError, match="gave what is no vector for 'w': indices"):
        ErrorFeedback(TopK(0.5)).compress("w", torch.ones(6), select=lambda accumulated: wrong)


def test_a_compressor_that_sends_nothing_since_its_density_fell():
    rounding_down = type("Down", (TopK,), {"entries": lambda self, numel: int(self.density * numel)})(0.5)
    feedback = ErrorFeedback(rounding_down)
    feedback.compress("w", torch.ones(6))
    rounding_down.density = 0.1
    with pytest.raises(ValueError, match=r"entries\(6\) is 0, expected k, 1 or more"):
        feedback.compress("w", torch.ones(6))


@settings(max_examples=5 * settings.default.max_examples)
@given(seeds, st.sampled_from([0.0, 0.9]), st.lists(st.booleans(), min_size=1, max_size=6))
def test_rollback_brings_every_bit_back(seed, momentum, outcomes):
    """Steps that are rolled back, with overflow in them, leave no trace beside those that are committed."""
    tentative = ErrorFeedback(TopK(0.1), momentum=momentum, tentative=True)
    plain = ErrorFeedback(TopK(0.1), momentum=momentum)
    for step, good in enumerate(outcomes):
        for name in ("a", "b"):
            gradient = torch.randn(40, generator=torch.Generator().manual_seed(seed + step))
            if good:
                plain.restore(name, plain.compress(name, gradient))
            else:
                gradient[3] = torch.inf
            tentative.restore(name, tentative.compress(name, gradient))
        if good:
            tentative.commit()
            assert_same_bits(state_bits(tentative), state_bits(plain))
        else:
            before = {name: tensor.clone() for name, tensor in tentative._other.items()}
            tentative.rollback()
            for name, known in before.items():
                assert torch.equal(tentative.residual(name), known.residual)
                assert known.residual.isfinite().all()


def test_a_tentative_step_may_compress_a_name_twice():
    feedback = ErrorFeedback(TopK(0.2), tentative=True)
    feedback.compress("w", torch.arange(5.0))
    feedback.compress("w", torch.arange(5.0))
    assert feedback.residual("w").tolist() == [0, 2, 4, 0, 4]
    feedback.rollback()
    assert feedback.residual("w").tolist() == [0] * 5


def test_a_step_that_finds_no_memory_is_not_open(monkeypatch):
    def clone(_):
        raise torch.OutOfMemoryError

    feedback = ErrorFeedback(TopK(0.5), tentative=True)
    monkeypatch.setattr("sparse_compress.accumulator.Accumulator.clone", clone)
    with pytest.raises(torch.OutOfMemoryError):
        feedback.compress("w", torch.ones(4))
    feedback.rollback()
    assert not feedback.residual("w").any()


def test_rollback_needs_tentative_steps():
    with pytest.raises(RuntimeError, match="tentative=True"):
        ErrorFeedback(TopK()).rollback()


def test_no_state_of_an_open_step():
    feedback = ErrorFeedback(TopK(), tentative=True)
    feedback.compress("w", torch.ones(3))
    for operation in (feedback.state_dict, lambda: feedback.load_state_dict({})):
        with pytest.raises(RuntimeError, match="commit"):
            operation()


@settings(max_examples=3 * settings.default.max_examples)
@given(seeds, modes)
def test_resumed_is_the_same_as_never_stopped(seed, mode):
    feedback = ErrorFeedback(TopK(0.1), **mode)
    gradients = torch.randn(6, 7, 9, generator=torch.Generator().manual_seed(seed))
    for gradient in gradients[:3]:
        feedback.compress("w", gradient)
        feedback.commit()
    file = io.BytesIO()
    torch.save(feedback.state_dict(), file)
    file.seek(0)
    resumed = ErrorFeedback(TopK(0.1), **mode)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    for gradient in gradients[3:]:
        assert torch.equal(feedback.compress("w", gradient).pack(), resumed.compress("w", gradient).pack())
        feedback.commit()
        resumed.commit()
    assert_same_bits(state_bits(feedback), state_bits(resumed))


def test_loading_copies():
    feedback = ErrorFeedback(TopK(0.1), momentum=0.9)
    feedback.compress("w", torch.randn(30))
    other = ErrorFeedback(TopK(0.1), momentum=0.9)
    other.load_state_dict(feedback.state_dict())
    before = state_bits(feedback)
    other.compress("w", torch.randn(30))
    assert_same_bits(state_bits(feedback), before)


def damaged(part=None, name="w", value=None, **parts):
    """A good state of two names, but for one part."""
    good = {key: {"w": torch.ones(3), "x": torch.ones(2)} for key in ("residuals", "velocities")} | parts
    if part:
        good[part] = good[part] | {name: value}
    return good


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (damaged(velocities={"w": torch.ones(3)}), r"velocities of \['w'\]"),
        (damaged(velocities={}), "another momentum"),
        (damaged("residuals", value=torch.ones(3).half()), "float16"),
        (damaged("residuals", value=torch.ones(4)), r"\(4,\) of torch.float32, expected \(3,\)"),
        (damaged("residuals", value=torch.ones(3).double()), "of torch.float64, expected"),
        (damaged("velocities", "x", torch.ones(3)), "velocity of 'x'"),
    ],
)
def test_a_bad_state_changes_nothing(state, message):
    feedback = ErrorFeedback(TopK(0.4), momentum=0.9)
    feedback.compress("w", torch.arange(3.0))
    before = state_bits(feedback)
    with pytest.raises(ValueError, match=message):
        feedback.load_state_dict(state)
    assert_same_bits(state_bits(feedback), before)
    feedback.load_state_dict(damaged())
    assert feedback.residual("w").tolist() == [1, 1, 1]


def test_a_state_with_momentum_needs_momentum():
    with pytest.raises(ValueError, match="another momentum"):
        ErrorFeedback(TopK()).load_state_dict(damaged())


@pytest.mark.parametrize(
    ("gradient", "error", "message"),
    [
        (torch.ones(4), ValueError, r"'w': \(4,\).* residual is \(2, 2\)"),
        (torch.ones(2, 2, dtype=torch.float64), ValueError, "accumulated in torch.float64"),
        (torch.ones(2, 2, device="meta"), ValueError, "on meta, but"),
        (torch.ones(2, 2, dtype=torch.int64), TypeError, "gradient of 'w' is torch.int64"),
        (torch.ones(2, 2, dtype=torch.complex64), TypeError, "complex64"),
        (torch.ones(2, 2).to_sparse(), TypeError, "to_dense"),
    ],
)
def test_bad_gradients_change_nothing(gradient, error, message):
    feedback = ErrorFeedback(TopK(0.5))
    feedback.compress("w", torch.ones(2, 2))
    before = feedback.residual("w").clone()
    with pytest.raises(error, match=message):
        feedback.compress("w", gradient)
    assert torch.equal(feedback.residual("w"), before)


def test_gradients_that_do_not_fit_leave_no_open_step():
    feedback = ErrorFeedback(TopK(0.5), tentative=True)
    feedback.compress("w", torch.ones(2))
    feedback.commit()
    with pytest.raises(ValueError, match="residual is"):
        feedback.compress("w", torch.ones(3))
    assert feedback.state_dict()["residuals"]["w"].tolist() == [0, 1]


def test_unknown_names():
    feedback = ErrorFeedback(TopK())
    feedback.compress("known", torch.ones(2))
    for operation in (lambda: feedback.residual("w"), lambda: feedback.restore("w", SparseVector.empty(2))):
        with pytest.raises(KeyError, match=r"no residual of 'w'; known: \['known'\]"):
            operation()


@pytest.mark.parametrize("dropped", [SparseVector.empty(3), SparseVector.empty(2, torch.float64)])
def test_dropped_must_fit(dropped):
    feedback = ErrorFeedback(TopK())
    feedback.compress("w", torch.ones(2))
    with pytest.raises(ValueError, match="cannot go back to 'w': expected numel=2"):
        feedback.restore("w", dropped)


@pytest.mark.parametrize("momentum", [-0.1, 1, float("nan")])
def test_bad_momentum(momentum):
    with pytest.raises(ValueError, match="expected 0 ≤ momentum < 1"):
        ErrorFeedback(TopK(), momentum=momentum)


def test_gradients_with_a_graph():
    parameter = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    feedback = ErrorFeedback(TopK(0.5), momentum=0.5)
    assert not feedback.compress("w", parameter).values.requires_grad
    assert not feedback.residual("w").requires_grad


def test_copies_are_independent():
    feedback = ErrorFeedback(TopK(0.5))
    feedback.compress("w", torch.ones(2))
    other = copy.deepcopy(feedback)
    other.compress("w", torch.ones(2))
    assert feedback.residual("w").tolist() == [0, 1]


@every_other_device
def test_steps_on_a_device_are_the_same_bits(device):
    on_cpu, on_gpu = (ErrorFeedback(TopK(0.01), momentum=0.5) for _ in range(2))
    for step in range(4):
        gradient = integers((300, 300), step)
        sent, sent_on_gpu = on_cpu.compress("w", gradient), on_gpu.compress("w", gradient.to(device))
        assert torch.equal(sent_on_gpu.pack().cpu(), sent.pack())
        on_cpu.restore("w", topk(sent.to_dense(), 5))
        on_gpu.restore("w", topk(sent_on_gpu.to_dense(), 5))
        assert torch.equal(on_gpu.residual("w").cpu(), on_cpu.residual("w"))


@settings(max_examples=5 * settings.default.max_examples)
@given(seeds, st.integers(1, 40), modes, st.data())
def test_withheld_spans_stay_as_they_are(seed, n, mode, data):
    low = data.draw(st.integers(0, n - 1))
    span = slice(low, data.draw(st.integers(low, n)))
    feedback = ErrorFeedback(TopK(0.3), **mode)
    feedback.compress("w", integers((n,), seed))
    feedback.commit()
    before = state_bits(feedback)
    gradient = integers((n,), seed + 1)
    gradient[span] = 0
    sent = feedback.compress("w", gradient, withhold=[span])
    assert not sent.to_dense()[span].any()
    feedback.commit()
    for (part, _), tensor in state_bits(feedback).items():
        assert torch.equal(tensor[span], before[part, "w"][span])
    if not mode["momentum"]:
        rest = torch.ones(n, dtype=torch.bool)
        rest[span] = False
        total = feedback.residual("w") + sent.to_dense()
        assert torch.equal(total[rest], (before["residuals", "w"] + gradient)[rest])


@given(seeds, modes)
def test_an_adopted_residual_is_gone_on_with(seed, mode):
    one, other = ErrorFeedback(TopK(0.3), **mode), ErrorFeedback(TopK(0.3), **mode)
    for feedback, name in ((one, "w"), (other, "u")):
        feedback.compress(name, integers((20,), seed))
        feedback.commit()
    state = other.state_dict()
    other.adopt("v", state["residuals"]["u"], state["velocities"].get("u"))
    for step in range(3):
        sent = [feedback.compress(name, integers((20,), seed + step)) for feedback, name in ((one, "w"), (other, "v"))]
        assert torch.equal(sent[0].to_dense(), sent[1].to_dense())
        assert torch.equal(one.residual("w"), other.residual("v"))
        one.commit()
        other.commit()
    with pytest.raises(ValueError, match="has a residual already"):
        other.adopt("v", torch.zeros(20))
