"""DeMo: its transform, what is sent and what stays, its bytes, and the published algorithm written down once more."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from communicators import SLOT_BYTES, CollectiveError, SimulatedWorld
from hypothesis import given
from hypothesis import strategies as st
from local_sgd import DeMo
from local_sgd.algorithms.demo import CosineMean, in_blocks, side
from local_sgd.parts import parts_of

pytestmark = pytest.mark.quick

SHAPES = ((), (1,), (7,), (64,), (0,), (130,), (6, 10), (64, 64), (65, 67), (128, 96), (0, 3), (5, 3, 2, 2), (2, 1, 9))
RANKS = [1, 2, 3, 5, 8]


def parameters(shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def mean_of(shapes, *, dtype=torch.float32, **settings):
    """The only part of such parameters, and what averages it on one rank."""
    named = {str(at): p.to(dtype) for at, p in enumerate(parameters(shapes))}
    [part] = parts_of([{"params": list(named.values())}], named, None, None)
    mean = CosineMean(**{"topk": 32, "chunk": 64, "decay": 0.95, **settings})
    SimulatedWorld(1).run(lambda comm: mean.begin([part], comm, "DeMo"))
    return part, mean


def matrix(array):
    rows = array.shape[0] if array.ndim > 1 else 1
    return array.reshape(rows, array.size // max(1, rows))


def blocks_of(array, chunk):
    """(block, height, width) of a NumPy array."""
    found = matrix(array)
    height, width = (max([d for d in range(1, chunk + 1) if n and n % d == 0], default=1) for n in found.shape)
    rows, columns = found.shape[0] // height, found.shape[1] // width
    return found.reshape(rows, height, columns, width).swapaxes(1, 2).reshape(-1, height, width)


@given(st.sampled_from(SHAPES), st.sampled_from([1, 3, 64, 181]), st.sampled_from([torch.float32, torch.float64]))
def test_the_basis_is_that_of_the_cosine_transform_and_leads_back(shape, chunk, dtype):
    from scipy.fft import dctn  # half a second, of whoever collects tests

    part, mean = mean_of([shape], dtype=dtype, chunk=chunk)
    x = part.gather()
    coefficients = mean.in_basis(part, x)
    expected = dctn(blocks_of(x.numpy().reshape(shape), chunk), axes=(1, 2), norm="ortho").reshape(-1)
    close = {"rtol": 0, "atol": 1e-4 if dtype == torch.float32 else 1e-12}
    torch.testing.assert_close(coefficients, torch.from_numpy(expected), **close)
    back = mean.out_of_basis(part, coefficients)
    assert torch.equal(back[x.abs() > 1e-3], x.sign()[x.abs() > 1e-3])


@given(st.integers(0, 300), st.integers(1, 181))
def test_a_side_is_the_largest_divisor_up_to_a_chunk(length, chunk):
    found = side(length, chunk)
    assert found == max([d for d in range(1, chunk + 1) if length and length % d == 0], default=1)


@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_are_views_of_every_element_once(shape):
    x = torch.zeros(shape)
    in_blocks(x, 8).add_(1)
    assert torch.equal(x, torch.ones(shape))


@given(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=4), st.sampled_from([1, 5, 32, 5000]), st.integers(0, 99))
def test_the_largest_of_each_block_travel_in_bfloat16(shapes, topk, seed):
    part, mean = mean_of(shapes, topk=topk)
    x = torch.randn(part.bucket.numel, generator=torch.Generator().manual_seed(seed))
    message = mean.encoded(part, x)
    places, values = mean.decoded(part, message, x)
    assert len(places.unique()) == len(places) == len(message) // 4
    assert torch.equal(values, x[places].to(torch.bfloat16).float())
    sent = torch.zeros(len(x), dtype=torch.bool).index_fill(0, places, value=True)
    first = 0
    for shape in shapes:
        blocks = blocks_of(np.empty(shape), 64)
        for size in [blocks.shape[1] * blocks.shape[2]] * len(blocks):
            rows, at = x[first : first + size], sent[first : first + size]
            first += size
            assert int(at.sum()) == min(topk, size)
            assert rows[at].abs().min() >= (rows[~at].abs().max() if (~at).any() else 0)
    assert first == len(x)


@pytest.mark.parametrize("x", [[3.4e38, -3.4e38, 1.0, 0.0], [1e-42, 0, 0, 0], [0, 0, 0, 0]])
def test_extremes_are_sent_as_finite_numbers(x):
    part, mean = mean_of([(4,)])
    given = torch.tensor(x).float()
    places, values = mean.decoded(part, mean.encoded(part, given), given)
    torch.testing.assert_close(torch.zeros(4).index_copy(0, places, values), given, rtol=0.01, atol=1e-38)


def gradients(shapes, step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def trained(comm, *, shapes=((70, 96), (130,), (5, 3, 2, 2)), steps=6, stop=None, through=lambda state: state, **given):
    """Parameters and coefficients that wait, by step; `stop`: goes on from a state then."""

    def begin():
        model = torch.nn.ParameterList(parameters(shapes))
        inner = torch.optim.SGD(model.parameters(), lr=0.01)
        return model, inner, DeMo(inner, comm=comm, model=model, **given)

    model, inner, optimizer = begin()
    history = []
    for step in range(steps):
        if step == stop:
            weights, state = (
                {name: p.clone() for name, p in model.state_dict().items()},
                through(optimizer.state_dict()),
            )
            model, inner, optimizer = begin()
            model.load_state_dict(weights)
            optimizer.load_state_dict(state)
        inner.param_groups[0]["lr"] = 0.01 / (1 + step)
        for p, gradient in zip(model, gradients(shapes, step, comm.rank), strict=True):
            p.grad = gradient
        optimizer.step()
        optimizer.average()
        waiting = optimizer.state_dict()["distributed"]["residuals"]["parts"]
        history.append([p.detach().clone() for p in model] + [waiting[name].clone() for name in sorted(waiting)])
    optimizer.finish()
    return history


def as_published(shapes, ranks, steps, *, topk=32, chunk=64, decay=0.999, weight_decay=0.0):
    """The algorithm in NumPy and float64, values travelling in bfloat16; and where no sign was that of rounding."""
    from scipy.fft import dctn, idctn

    model = [p.detach().double().numpy() for p in parameters(shapes)]
    momenta, sure = [[np.zeros_like(p) for p in model] for _ in range(ranks)], [np.full(p.shape, True) for p in model]
    for step in range(steps):
        rate, grads = 0.01 / (1 + step), [gradients(shapes, step, rank) for rank in range(ranks)]
        for at, p in enumerate(model):
            total, count = 0.0, 0.0
            for rank in range(ranks):
                m = momenta[rank][at] = decay * momenta[rank][at] + rate * grads[rank][at].double().numpy()
                blocks = dctn(blocks_of(m, chunk), axes=(1, 2), norm="ortho")
                rows, sent = blocks.reshape(len(blocks), -1), np.zeros((len(blocks), blocks[0].size))
                places = np.argsort(-np.abs(rows), 1, kind="stable")[:, :topk]
                values = torch.from_numpy(np.take_along_axis(rows, places, 1)).bfloat16().double().numpy()
                np.put_along_axis(sent, places, values, 1)
                momenta[rank][at] = unblocked(idctn((rows - sent).reshape(blocks.shape), axes=(1, 2), norm="ortho"), m)
                total, count = total + sent, count + (sent != 0)
            found = idctn((total / np.maximum(count, 1)).reshape(blocks.shape), axes=(1, 2), norm="ortho")
            mean = unblocked(found, p)
            model[at] = p * (1 - rate * weight_decay) - rate * np.sign(mean)
            sure[at] &= np.abs(mean) > 1e-6
    return model, sure


def unblocked(blocks, like):
    """Inverse of `blocks_of`."""
    places = blocks_of(np.arange(like.size).reshape(like.shape), 64).reshape(-1)
    found = np.empty(like.size)
    found[places] = blocks.reshape(-1)
    return found.reshape(like.shape)


@pytest.mark.few(5)
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("settings", [{}, {"topk": 3, "decay": 0.5, "weight_decay": 0.1}, {"topk": 5000}])
def test_it_is_the_published_algorithm(ranks, settings):
    shapes = (70, 96), (130,), (5, 12)
    expected, sure = as_published(shapes, ranks, 4, **settings)
    found = SimulatedWorld(ranks).run(partial(trained, shapes=shapes, steps=4, **settings))
    for history in found:
        assert all(torch.equal(own, first) for own, first in zip(history[-1], found[0][-1][:3], strict=False))
        for own, its, at in zip(history[-1][:3], expected, sure, strict=True):
            assert at.mean() > 0.9
            np.testing.assert_allclose(own.double().numpy()[at], its[at], rtol=0, atol=1e-5)


@pytest.mark.parametrize("ranks", RANKS)
def test_what_is_sent_and_what_stays_is_what_was_there(ranks):
    """q + m′ = β·m + the transform of η·g, in each coefficient; only the largest have changed hands."""
    shapes = ((64, 128), (128,))
    part, mean = mean_of(shapes)
    for rank, history in enumerate(SimulatedWorld(ranks).run(partial(trained, shapes=shapes, steps=4))):
        before = torch.zeros(part.bucket.numel, dtype=torch.float64)
        for step, state in enumerate(history):
            flat = torch.cat([g.view(-1) for g in gradients(shapes, step, rank)])
            given = 0.999 * before - 0.01 / (1 + step) * mean.in_basis(part, flat).double()
            after = torch.cat([each.view(-1) for each in state[2:]]).double()
            sent = torch.where((given - after).abs() > 3e-6, given - after, 0)  # without what float32 rounds off
            assert int((sent != 0).sum()) == 2 * 32 + 2 * 32
            kept = torch.where(sent != 0, after, 0)
            assert (kept.abs() <= given.abs() / 256 + 1e-6).all()  # the rounding error of bfloat16
            before = after


@pytest.mark.parametrize("ranks", RANKS)
def test_it_goes_on_with_the_same_bits(ranks, saved):
    straight, resumed = (SimulatedWorld(ranks).run(partial(trained, stop=stop, through=saved)) for stop in (None, 4))
    for one, other in zip(straight, resumed, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one[-1], other[-1], strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("every", [1, 3])
def test_a_change_that_would_be_rounded_off_beside_a_weight_counts(dtype, every):
    """In η·g, and in the sign's step itself: a loss of 2⁻²⁴ of the size leads to the same model, bit for bit."""

    def body(comm):
        found = []
        for scale in (1.0, 2.0**-24):
            p = torch.nn.Parameter(torch.full((64, 64), 64.0, dtype=dtype))
            optimizer = DeMo(torch.optim.SGD([p], lr=0.5), comm=comm, sync_every=every)
            for step in range(6):
                generator = torch.Generator().manual_seed(10 * step + comm.rank)
                p.grad = scale * torch.randn(64, 64, generator=generator).to(dtype)
                optimizer.step()
                optimizer.average()
            found.append(p.detach().clone())
        return found

    for one, other in SimulatedWorld(2).run(body):
        assert torch.equal(one, other)
        assert not torch.equal(one, torch.full_like(one, 64.0))


def test_an_error_of_the_optimizer_inside_leaves_the_parameters():
    class Fails(torch.optim.SGD):
        def step(self, closure=None):
            raise ZeroDivisionError

    p = torch.nn.Parameter(torch.arange(64.0))
    optimizer = DeMo(Fails([p], lr=0.5))
    p.grad = torch.ones(64)
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    assert torch.equal(p.detach(), torch.arange(64.0))


def test_a_closure_is_called_once_with_the_model():
    p = torch.nn.Parameter(torch.full((64,), 2.0))
    optimizer, seen = DeMo(torch.optim.SGD([p], lr=0.5)), []

    def closure():
        seen.append(p.detach().clone())
        p.grad = None
        loss = p.sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 128
    optimizer.average()
    assert len(seen) == 1
    assert torch.equal(seen[0], torch.full((64,), 2.0))
    assert torch.equal(p.detach(), torch.full((64,), 1.5))


def test_autocast_round_the_step_changes_no_bit():
    def body(comm, on):
        p = torch.nn.Parameter(torch.zeros(64, 64))
        optimizer = DeMo(torch.optim.SGD([p], lr=0.5), comm=comm)
        p.grad = torch.randn(64, 64, generator=torch.Generator().manual_seed(comm.rank))
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            optimizer.step()
            optimizer.average()
        return p.detach(), optimizer.state_dict()["distributed"]["residuals"]["parts"]["parameter 0"]

    for with_it, without in zip(*(SimulatedWorld(2).run(partial(body, on=on)) for on in (True, False)), strict=True):
        assert all(torch.equal(one, other) for one, other in zip(with_it, without, strict=True))


@pytest.mark.parametrize("shape", [(64,), (64, 64)])  # one coefficient is inf, or all but it are NaN
@pytest.mark.parametrize("large", [6e37, 3e36])
def test_what_is_too_large_to_be_transformed_ends_training_on_all_ranks(large, shape):
    """And leaves m as it was, so that a smaller gradient goes on."""

    def body(comm):
        p = torch.nn.Parameter(torch.zeros(shape))
        optimizer = DeMo(torch.optim.SGD([p], lr=1.0), comm=comm, decay=0.0)
        p.grad = torch.full(shape, 1.0 if comm.rank else large)
        optimizer.step()
        if large > 1e37:
            with pytest.raises(CollectiveError, match="overflows"):
                optimizer.average()
        else:
            optimizer.average()
        return optimizer.stats()["residual_norm"]

    norms = SimulatedWorld(2).run(body)
    assert all(math.isfinite(norm) for norm in norms)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_precisions(dtype):
    def body(comm):
        p = torch.nn.Parameter(torch.ones(64, dtype=dtype))
        optimizer = DeMo(torch.optim.SGD([p], lr=0.25), comm=comm)
        p.grad = torch.ones(64, dtype=dtype)
        optimizer.step()
        optimizer.average()
        return p.detach()

    for p in SimulatedWorld(2).run(body):
        assert torch.equal(p, torch.full((64,), 0.75, dtype=dtype))


@pytest.mark.parametrize("ranks", RANKS)
def test_bytes_are_four_for_each_of_32_in_4096(ranks):
    def body(comm):
        p = torch.nn.Parameter(torch.zeros(640, 128))
        optimizer = DeMo(torch.optim.SGD([p], lr=0.1), comm=comm)
        sent, p.grad = comm.bytes_sent, torch.randn(640, 128)
        optimizer.step()
        optimizer.average()
        return comm.bytes_sent - sent

    nbytes = 4 * 32 * 20
    for sent in SimulatedWorld(ranks).run(body):
        assert (ranks - 1) * nbytes <= sent < (ranks - 1) * nbytes + 40 * SLOT_BYTES


def test_a_finished_rank_keeps_what_it_has_and_does_not_count():
    """Rank 0 sends the pattern of a constant once, and keeps the other; then rank 1 sends what is half of that."""
    wave = math.pi / 64 * (torch.arange(64) + 0.5)

    def body(comm):
        p = torch.nn.Parameter(torch.zeros(64))
        optimizer = DeMo(torch.optim.SGD([p], lr=0.5), comm=comm, topk=1)
        for _ in range(1 + 3 * comm.rank):
            p.grad = torch.ones(64) if comm.rank else -torch.ones(64) + 0.1 * wave.cos()
            optimizer.step()
            optimizer.average()
        waits = optimizer.state_dict()["distributed"]["residuals"]["parts"]["parameter 0"].clone()
        optimizer.finish()
        return p.detach(), waits, optimizer.state_dict()["distributed"]["residuals"]["parts"]["parameter 0"]

    for rank, (p, waits, at_last) in enumerate(SimulatedWorld(2).run(body)):
        assert torch.equal(waits, at_last)
        assert (waits.abs() > 0.1).any() or rank
        assert torch.equal(p.sign(), -torch.ones(64))


def test_a_coefficient_is_a_mean_over_those_who_sent_it():
    """One rank's pattern counts in full beside another's that two share: over all three it would be outweighed."""
    wave = (math.pi / 64 * 3 * (torch.arange(64) + 0.5)).cos()

    def body(comm):
        p = torch.nn.Parameter(torch.zeros(64))
        optimizer = DeMo(torch.optim.SGD([p], lr=0.5), comm=comm, topk=1)
        p.grad = 1.5 * wave if comm.rank == 0 else torch.ones(64)
        optimizer.step()
        optimizer.average()
        return p.detach()

    expected = -0.5 * (1.5 * wave + 1).sign()
    for p in SimulatedWorld(3).run(body):
        assert torch.equal(p, expected)
    assert not torch.equal(expected, -0.5 * (1.5 * wave / 3 + 2 / 3).sign())


def test_the_rate_is_the_mean_over_ranks_of_each_group():
    def body(comm):
        one, other = (torch.nn.Parameter(torch.zeros(64)) for _ in range(2))
        groups = [{"params": [one], "lr": 0.25 * (1 + comm.rank)}, {"params": [other], "lr": 1.0}]
        optimizer = DeMo(torch.optim.SGD(groups), comm=comm)
        one.grad, other.grad = torch.ones(64), -torch.ones(64)
        optimizer.step()
        optimizer.average()
        return float(one.detach().mean()), float(other.detach().mean())

    assert SimulatedWorld(2).run(body) == [(-0.375, 1.0)] * 2


def test_a_nan_ends_training_on_all_ranks():
    def body(comm):
        p = torch.nn.Parameter(torch.zeros(64))
        optimizer = DeMo(torch.optim.SGD([p], lr=0.5), comm=comm)
        p.grad = torch.full((64,), math.nan if comm.rank else 1.0)
        optimizer.step()
        with pytest.raises(CollectiveError, match=r"not finite in .* of ranks \[1\]"):
            optimizer.average()
        return True

    assert SimulatedWorld(2).run(body) == [True, True]


@pytest.mark.parametrize(("name", "values"), [("topk", (32, 33)), ("chunk", (64, 32)), ("decay", (0.5, 0.6))])
def test_ranks_with_other_settings_are_told(name, values):
    def body(comm):
        given = {name: values[comm.rank]}
        DeMo(torch.optim.SGD([torch.nn.Parameter(torch.zeros(10))], lr=0.1), comm=comm, **given)

    with pytest.raises(CollectiveError, match=rf"{name}={values[0]}.*{name}={values[1]}"):
        SimulatedWorld(2).run(body)


def test_a_state_of_other_blocks_is_refused():
    def made(chunk):
        return DeMo(torch.optim.SGD([torch.nn.Parameter(torch.zeros(64, 64))], lr=0.1), chunk=chunk)

    with pytest.raises(ValueError, match=r"cosines in blocks of 64, but .* is cosines in blocks of 32"):
        made(32).load_state_dict(made(64).state_dict())


def test_a_weight_decay_inside_is_refused():
    inner = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(ValueError, match="give it weight_decay=0, and DeMo the weight_decay"):
        DeMo(inner)


def test_a_weight_decay_that_is_set_inside_later_is_refused_at_the_next_step():
    p = torch.nn.Parameter(torch.zeros(1))
    optimizer = DeMo(torch.optim.SGD([p], lr=0.1))
    optimizer.param_groups[0]["weight_decay"] = 0.1
    p.grad = torch.ones(1)
    with pytest.raises(ValueError, match="give it weight_decay=0, and DeMo the weight_decay"):
        optimizer.step()
    assert p.item() == 0


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"topk": 0}, "topk is 0, expected 1 or more"),
        ({"chunk": 200}, "chunk is 200, expected 181 at most"),
        ({"decay": 1.0}, "decay is 1.0, expected 0 ≤ decay < 1"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1, expected 0 or more"),
        ({"weighted": True}, "without weighted=True: leave it out"),
        ({"native": True}, "without native=True: leave it out"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, says):
    with pytest.raises(ValueError, match=says):
        DeMo(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1), **settings)
