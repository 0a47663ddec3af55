"""What is the same as what: in bits, or within rounding, as theory has it."""

import pytest
import torch
from communicators import SimulatedWorld, allreduce
from hypothesis import given
from hypothesis import strategies as st
from local_sgd import BMUF, EASGD, CoCoDSGD, DiLoCo, LocalSGD, OverlapLocalSGD, SlowMo

pytestmark = pytest.mark.quick

STEPS = 24


def sgd(parameters, **settings):
    return torch.optim.SGD(parameters, lr=0.1, **settings)


def run(quadratic, size, make, *, inner=sgd, dtype=torch.float64, spread=1.0, scheduler=None, rank=None):
    """Every rank's x after training, without drain."""

    def body(comm):
        task = quadratic(comm.rank if rank is None else rank, dtype=dtype, spread=spread)
        optimizer = make(inner(task.model.parameters()), comm)
        for step in range(STEPS):
            if scheduler is not None:
                optimizer.param_groups[0]["lr"] = scheduler(step)
            task.train(optimizer, [step])
        x = task.flat()
        optimizer.finish()
        return x

    return SimulatedWorld(size).run(body)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "make",
    [
        lambda inner, comm: LocalSGD(inner, comm=comm, sync_every=3),
        lambda inner, comm: CoCoDSGD(inner, comm=comm, sync_every=3),
        lambda inner, comm: BMUF(inner, comm=comm, sync_every=3, block_rate=1.0, momentum=0.0, nesterov=False),
        lambda inner, comm: BMUF(inner, comm=comm, sync_every=3),
        lambda inner, comm: LocalSGD(inner, comm=comm, sync_every=3, native=True),
    ],
)
@pytest.mark.parametrize("inner", [sgd, lambda p: sgd(p, momentum=0.9), torch.optim.AdamW])
def test_alone_they_are_the_inner_optimizer_in_bits(quadratic, make, inner, dtype):
    [x] = run(quadratic, 1, make, inner=inner, dtype=dtype)
    task = quadratic(0, dtype=dtype)
    optimizer = inner(task.model.parameters())
    for step in range(STEPS):
        task.backward(step)
        optimizer.step()
    assert torch.equal(x, task.flat())


@pytest.mark.few(5)
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(
    "settings", [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, {"weight_decay": 0.1}]
)
@pytest.mark.parametrize("momenta", ["keep", "average"])
def test_at_every_step_it_is_synchronous_sgd_within_rounding(quadratic, size, settings, momenta):
    def synchronous(comm):
        task = quadratic(comm.rank, dtype=torch.float64)
        optimizer = sgd(task.model.parameters(), **settings)
        for step in range(STEPS):
            task.backward(step)
            for p in task.model.values():
                p.grad = allreduce(p.grad, comm, average=True)
            optimizer.step()
        return task.flat()

    local = run(
        quadratic,
        size,
        lambda inner, comm: LocalSGD(inner, comm=comm, sync_every=1, inner_state=momenta),
        inner=lambda p: sgd(p, **settings),
    )
    for x, expected in zip(local, SimulatedWorld(size).run(synchronous), strict=True):
        torch.testing.assert_close(x, expected, rtol=1e-12, atol=1e-12)


def assert_same(quadratic, one, other, size=3, **options):
    for x, y in zip(run(quadratic, size, one, **options), run(quadratic, size, other, **options), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("nesterov", [False, True])
def test_bmuf_without_momentum_is_local_sgd_within_rounding(quadratic, nesterov):
    assert_same(
        quadratic,
        lambda inner, comm: BMUF(inner, comm=comm, sync_every=3, block_rate=1.0, momentum=0.0, nesterov=nesterov),
        lambda inner, comm: LocalSGD(inner, comm=comm, sync_every=3),
    )


@given(st.floats(0.1, 1.0), st.floats(0.0, 0.95))
def test_slowmo_is_bmuf_at_a_constant_rate(quadratic, α, β):
    assert_same(
        quadratic,
        lambda inner, comm: SlowMo(inner, comm=comm, sync_every=3, alpha=α, beta=β),
        lambda inner, comm: BMUF(inner, comm=comm, sync_every=3, block_rate=α, momentum=β, nesterov=False),
    )


def test_bmuf_of_nesterov_is_diloco(quadratic):
    assert_same(
        quadratic,
        lambda inner, comm: BMUF(inner, comm=comm, sync_every=3, block_rate=0.7, momentum=0.9),
        lambda inner, comm: DiLoCo(inner, comm=comm, sync_every=3),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_diloco_has_the_bits_of_torch_sgd_on_the_change(quadratic, dtype):
    def by_hand(comm):
        task = quadratic(comm.rank, dtype=dtype)
        inner = sgd(task.model.parameters())
        z = torch.nn.Parameter(task.flat().clone())
        outer = torch.optim.SGD([z], lr=0.7, momentum=0.9, nesterov=True)
        for step in range(STEPS):
            task.backward(step)
            inner.step()
            if (step + 1) % 3 == 0:
                z.grad = z.detach() - allreduce(task.flat(), comm, average=True, native=False)
                outer.step()
                torch.nn.utils.vector_to_parameters(z.detach().clone(), task.model.parameters())
        return task.flat()

    found = run(quadratic, 2, lambda inner, comm: DiLoCo(inner, comm=comm, sync_every=3), dtype=dtype)
    for x, expected in zip(found, SimulatedWorld(2).run(by_hand), strict=True):
        assert torch.equal(x, expected)


def test_slowmo_survives_a_rate_that_decays_to_zero_and_comes_back(quadratic):
    rates = [0.1, 0.05, 0.01, 0.0, 0.0, 0.1, 0.1, 0.1]
    found = run(
        quadratic,
        2,
        lambda inner, comm: SlowMo(inner, comm=comm, sync_every=3),
        scheduler=lambda step: rates[step // 3],
    )
    assert all(torch.isfinite(x).all() for x in found)
    assert all(x.abs().max() < 10 for x in found)


def test_overlap_without_pull_is_independent_sgd(quadratic):
    found = run(quadratic, 3, lambda inner, comm: OverlapLocalSGD(inner, comm=comm, alpha=0.0))
    for rank, x in enumerate(found):
        task = quadratic(rank, dtype=torch.float64)
        optimizer = sgd(task.model.parameters())
        for step in range(STEPS):
            task.backward(step)
            optimizer.step()
        assert torch.equal(x, task.flat())


def test_overlap_on_identical_data_is_overlap_of_one_rank(quadratic):
    make = lambda inner, comm: OverlapLocalSGD(inner, comm=comm)  # noqa: E731
    [alone] = run(quadratic, 1, make, rank=0)
    for x in run(quadratic, 4, make, rank=0):
        torch.testing.assert_close(x, alone, rtol=1e-12, atol=1e-12)


def test_overlap_moves_at_the_stated_fraction_of_sgd():
    """A constant gradient: (1 − α)/(1 − αβ) of SGD's step."""

    def body(comm):
        p = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        optimizer = OverlapLocalSGD(sgd([p]), comm=comm)
        places = []
        for _ in range(400):
            p.grad = torch.ones_like(p)
            optimizer.step()
            optimizer.average()
            places.append(p.item())
        optimizer.finish()
        return (places[-101] - places[-1]) / 100 / 0.1

    for speed in SimulatedWorld(2).run(body):
        assert speed == pytest.approx(0.4 / (1 - 0.42), rel=1e-9)


@given(st.sampled_from([1, 2, 3, 5]), st.floats(0.01, 0.99), st.integers(1, 5))
def test_easgd_conserves_the_sum_of_ranks_and_anchor(m, fraction, tau):
    α = fraction * 2 / (m + 1)

    def total(comm, optimizer, p):
        x = p.detach().clone()
        with optimizer.averaged_model():
            return allreduce(x, comm) + p.detach()

    def body(comm):
        p = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
        optimizer = EASGD(sgd([p]), comm=comm, sync_every=tau, alpha=α)
        sums = []
        for step in range(3 * tau):
            p.grad = torch.full_like(p, float(comm.rank + step))
            optimizer.step()
            before = total(comm, optimizer, p)
            optimizer.average()
            sums.append((before, total(comm, optimizer, p)))
        optimizer.finish()
        return sums

    for before, after in SimulatedWorld(m).run(body)[0]:
        torch.testing.assert_close(after, before, rtol=1e-13, atol=1e-13)


@given(st.sampled_from([1, 2, 3, 5, 8]), st.floats(0.02, 0.98))
def test_easgd_contracts_inside_its_range(m, fraction):
    """Both the ranks' spread and the distance of their mean from the anchor, by 1 − α and |1 − α(m + 1)|."""
    α = fraction * 2 / (m + 1)

    def body(comm):
        p = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        optimizer = EASGD(torch.optim.SGD([p], lr=1.0), comm=comm, sync_every=1, alpha=α)
        p.grad = torch.full_like(p, -(comm.rank + 1))
        optimizer.step()
        optimizer.average()
        x = p.item()
        with optimizer.averaged_model():
            anchor = p.item()
        optimizer.finish()
        return x, anchor

    xs, anchors = zip(*SimulatedWorld(m).run(body), strict=True)
    assert len(set(anchors)) == 1
    assert max(xs) - min(xs) == pytest.approx((1 - α) * (m - 1))
    assert sum(xs) / m - anchors[0] == pytest.approx((1 - α * (m + 1)) * (m + 1) / 2)


@given(st.sampled_from([1, 2, 3, 5, 8]), st.floats(0.0, 3.0))
def test_easgd_refuses_what_does_not_contract(m, beyond):
    def body(comm):
        p = torch.nn.Parameter(torch.zeros(1))
        for wrong in (2 / (m + 1) + beyond, -beyond):
            with pytest.raises(ValueError, match=r"expected 0 < alpha < 2/\(P \+ 1\)"):
                EASGD(sgd([p]), comm=comm, alpha=wrong)

    SimulatedWorld(m).run(body)
