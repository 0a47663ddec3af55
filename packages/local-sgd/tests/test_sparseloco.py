"""SparseLoCo: what is sent and what stays, its bytes, the mean over who sent, and what equals what."""

from functools import partial

import pytest
import torch
from communicators import SLOT_BYTES, CollectiveError, SimulatedWorld
from hypothesis import given
from hypothesis import strategies as st
from local_sgd import DiLoCo, SparseLoCo
from local_sgd.algorithms.sparseloco import CHUNK, ChunkMean

pytestmark = pytest.mark.quick

NUMELS = st.sampled_from([0, 1, 5, 100, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 9000])
DENSITIES = st.sampled_from([1e-6, 0.003, 1 / 64, 0.5, 1.0])
PLAIN = partial(torch.optim.SGD, lr=1.0)


def counts(numel, density):
    """Elements that are sent of each chunk."""
    return [max(1, round(density * min(CHUNK, numel - start))) for start in range(0, numel, CHUNK)]


def sent_of(x, density):
    """As a vector, and a mask of its places."""
    mean = ChunkMean(density=density, decay=1.0)
    places, values = mean.decoded(None, mean.encoded(None, x), x)
    assert len(places.unique()) == len(places)
    return torch.zeros_like(x).index_copy(0, places, values), torch.zeros(len(x)).index_fill(0, places, 1).bool()


@given(NUMELS, DENSITIES, st.sampled_from([torch.float32, torch.float64]), st.integers(0, 99))
def test_the_largest_of_each_chunk_travel_with_one_of_two_magnitudes(numel, density, dtype, seed):
    x = torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)
    values, places = sent_of(x, density)
    assert values.dtype == dtype
    assert [int(at.sum()) for at in places.split(CHUNK)][: len(counts(numel, density))] == counts(numel, density)
    for chunk, sent, at in zip(x.split(CHUNK), values.split(CHUNK), places.split(CHUNK), strict=True):
        if not len(chunk):
            continue
        assert chunk[at].abs().min() >= (chunk[~at].abs().max() if (~at).any() else 0)
        assert torch.equal(sent[at].sign(), chunk[at].sign())
        assert len(sent[at].abs().unique()) <= 2
        assert float(sent[at].abs().sum()) == pytest.approx(float(chunk[at].abs().sum()), rel=0.01)  # unbiased
        assert not sent[~at].any()


@pytest.mark.parametrize("x", [[1, -3, 0, 0], [0, 0, 0, 0], [5, 0, 5, -5], [0, -2, 0, 0]])
def test_zeros_stay_zeros(x):
    values, _ = sent_of(torch.tensor(x).float(), 1.0)
    assert torch.equal(values == 0, torch.tensor(x) == 0)


@given(NUMELS, DENSITIES)
def test_bytes_are_14_bits_an_element_and_two_magnitudes_a_chunk(numel, density):
    nbytes = len(ChunkMean(density=density, decay=1.0).encoded(None, torch.ones(numel)))
    sent = counts(numel, density)
    assert 14 * sum(sent) / 8 + 4 * len(sent) <= nbytes < 14 * sum(sent) / 8 + 4 * len(sent) + 14


@pytest.mark.parametrize("x", [[3e38] * 5 + [0] * 5, [3.4e38, 1.0], [1e-42, 0, 0], [-0.0, 2.0]])
def test_extremes_are_sent_as_finite_numbers(x):
    x = torch.tensor(x)
    values, _ = sent_of(x, 1.0)
    torch.testing.assert_close(values, x, rtol=0.01, atol=1e-38)


def moved(comm, *, steps=6, numel=5000, decay=0.95, stop=None, through=lambda state: state, **settings):
    """Models, residuals and what was given, by step; `stop`: goes on from a state then."""

    def begin():
        p = torch.nn.Parameter(torch.zeros(numel))
        options = {"sync_every": 1, "outer": PLAIN, "decay": decay} | settings
        return p, SparseLoCo(torch.optim.SGD([p], lr=0.1), comm=comm, **options)

    p, optimizer = begin()
    history, before, z = [], torch.zeros(numel), torch.zeros(numel)
    for step in range(steps):
        if step == stop:
            weights, state = p.detach().clone(), through(optimizer.state_dict())
            p, optimizer = begin()
            p.data.copy_(weights)
            optimizer.load_state_dict(state)
        p.grad = torch.randn(numel, generator=torch.Generator().manual_seed(10 * step + comm.rank))
        optimizer.step()
        given = decay * before + (p.detach() - z)
        optimizer.average()
        z = p.detach().clone()
        before = optimizer.state_dict()["distributed"]["residuals"]["parts"]["parameter 0"].clone()
        history.append((z, before, given - before))
    return history


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_the_model_moves_by_the_mean_over_who_sent_and_the_rest_stays(ranks):
    """s + e′ = β·e + Δ on every rank; an element that one rank alone has sent moves by all of it."""
    before = torch.zeros(5000, dtype=torch.float64)
    for one in zip(*SimulatedWorld(ranks).run(partial(moved, steps=4)), strict=True):
        zs, _, rounded = zip(*one, strict=True)
        sent = [torch.where(s.abs() > 1e-6, s.double(), 0) for s in rounded]  # without what float32 rounds off
        assert [int((s != 0).sum()) for s in sent] == [sum(counts(5000, 1 / 64))] * ranks
        assert all(torch.equal(z, zs[0]) for z in zs)
        senders = sum((s != 0).double() for s in sent)
        moved_by = zs[0].double() - before
        torch.testing.assert_close(moved_by, sum(sent) / senders.clamp(min=1), rtol=0, atol=2e-6)
        before = zs[0].double()


@pytest.mark.few(3)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_it_goes_on_with_the_same_bits(ranks, saved):
    straight, resumed = (
        SimulatedWorld(ranks).run(partial(moved, stop=stop, through=saved, sync_every=1)) for stop in (None, 4)
    )
    for one, other in zip(straight, resumed, strict=True):
        for mine, its in zip(one, other, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, its, strict=True))


@pytest.mark.few(5)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("uneven", [False, True])
def test_with_all_elements_of_one_size_it_is_diloco(ranks, uneven):
    """Density 1 loses nothing where magnitudes are alike. A rank that has finished is left out of the means."""

    def body(comm):
        models = []
        for make in (partial(SparseLoCo, density=1.0), DiLoCo):
            p = torch.nn.Parameter(torch.zeros(300))
            optimizer = make(torch.optim.SGD([p], lr=0.5), comm=comm, sync_every=1, outer=PLAIN)
            for step in range(1 + 2 * comm.rank if uneven else 3):
                generator = torch.Generator().manual_seed(10 * step + comm.rank)
                p.grad = torch.randint(2, (300,), generator=generator).float() * 2 - 1
                optimizer.step()
                optimizer.average()
            optimizer.finish()
            models.append(p.detach().clone())
        return models

    for sparse, dense in SimulatedWorld(ranks).run(body):
        torch.testing.assert_close(sparse, dense, rtol=0, atol=1e-5)


def test_a_finished_rank_keeps_its_residual():
    def body(comm):
        p = torch.nn.Parameter(torch.zeros(5000))
        optimizer = SparseLoCo(torch.optim.SGD([p], lr=1.0), comm=comm, sync_every=1)
        for step in range(2 + 5 * comm.rank):
            p.grad = torch.randn(5000, generator=torch.Generator().manual_seed(step))
            optimizer.step()
            optimizer.average()
        held = optimizer.state_dict()["distributed"]["residuals"]["parts"]["parameter 0"].clone()
        optimizer.finish()
        return held, optimizer.state_dict()["distributed"]["residuals"]["parts"]["parameter 0"]

    for before, after in SimulatedWorld(2).run(body):
        assert torch.equal(before, after)


def test_what_one_rank_alone_has_changed_moves_by_all_of_it_and_nothing_else_does():
    """Also where others send zeros for want of anything else."""

    def body(comm):
        p = torch.nn.Parameter(torch.zeros(5000))
        optimizer = SparseLoCo(torch.optim.SGD([p], lr=1.0), comm=comm, sync_every=1, outer=PLAIN)
        p.grad = torch.zeros(5000)
        p.grad[[0, 5, 100, 3000, 4095, 4999]] = -1.0 * (comm.rank == 0)
        optimizer.step()
        optimizer.average()
        return p.detach().clone()

    for model in SimulatedWorld(4).run(body):
        assert model.nonzero().view(-1).tolist() == [0, 5, 100, 3000, 4095, 4999]
        assert torch.equal(model[model != 0], torch.ones(6))


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_bytes_on_the_way(ranks):
    """Each rank's message is handed on to all others, P − 1 of them."""

    def body(comm):
        p = torch.nn.Parameter(torch.zeros(100_000))
        optimizer = SparseLoCo(torch.optim.SGD([p], lr=0.1), comm=comm, sync_every=1)
        sent = comm.bytes_sent
        p.grad = torch.randn(100_000)
        optimizer.step()
        optimizer.average()
        return comm.bytes_sent - sent

    nbytes = len(ChunkMean(density=1 / 64, decay=1.0).encoded(None, torch.ones(100_000)))
    for sent in SimulatedWorld(ranks).run(body):
        assert (ranks - 1) * nbytes <= sent < (ranks - 1) * nbytes + 40 * SLOT_BYTES


def test_ranks_with_other_settings_are_told():
    def body(comm):
        p = torch.nn.Parameter(torch.zeros(10))
        SparseLoCo(torch.optim.SGD([p], lr=0.1), comm=comm, density=0.5 / (comm.rank + 1))

    with pytest.raises(CollectiveError, match=r"density=0\.5,.*density=0\.25,"):
        SimulatedWorld(2).run(body)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"density": 0}, "density is 0, expected above 0"),
        ({"density": 1.5}, "density is 1.5, expected above 0, and 1 at most"),
        ({"decay": -0.1}, "decay is -0.1, expected 0 ≤ decay ≤ 1"),
        ({"weighted": True}, "without weighted=True: leave it out"),
        ({"native": True}, "without native=True: leave it out"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, says):
    with pytest.raises(ValueError, match=says):
        SparseLoCo(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1), **settings)
