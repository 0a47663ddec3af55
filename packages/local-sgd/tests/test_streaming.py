"""Streaming DiLoCo: every parameter in one fragment, its recurrence, what is under way, and ends."""

import copy
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from communicators import CollectiveError, Link, SimulatedWorld
from hypothesis import given
from hypothesis import strategies as st
from local_sgd import DiLoCo, StreamingDiLoCo
from local_sgd.fragments import fragments_of
from torch import nn

pytestmark = pytest.mark.quick

STEPS, SIZES = 50, (5, 1, 7, 2)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 40))
def test_fragments_by_bytes_leave_nothing_out(numels, count):
    trained = {f"p{i}": torch.zeros(n, dtype=[torch.float32, torch.float64][i % 2]) for i, n in enumerate(numels)}
    cut = fragments_of(trained, count)
    assert [name for one in cut for name in one] == list(trained)
    assert len(cut) == min(count, len(numels))
    assert all(cut)
    nbytes = [sum(p.nbytes for p in one.values()) for one in cut]
    largest = max(p.nbytes for p in trained.values())
    assert max(nbytes) <= sum(nbytes) / len(cut) + largest


@given(st.permutations(range(8)), st.sets(st.integers(1, 7)))
def test_fragments_by_names_leave_nothing_out(order, cuts):
    trained = {f"p{i}": torch.zeros(i + 1) for i in range(8)}
    bounds = [0, *sorted(cuts), 8]
    asked = [[f"p{i}" for i in order[low:high]] for low, high in pairwise(bounds)]
    assert [list(one) for one in fragments_of(trained, asked)] == asked
    with pytest.raises(ValueError, match=f"parameters in no fragment: .*p{order[-1]}"):
        fragments_of(trained, [*asked[:-1], asked[-1][:-1]] if len(asked[-1]) > 1 else asked[:-1])


def test_fragments_by_modules():
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    trained = dict(model.named_parameters())
    cut = fragments_of(trained, [model[2], ["0.bias", "0.weight"]])
    assert [list(one) for one in cut] == [["2.weight", "2.bias"], ["0.bias", "0.weight"]]
    with pytest.raises(ValueError, match=r"parameters in no fragment: \['2.weight', '2.bias'\]; add a module or"):
        fragments_of(trained, [model[0]])
    with pytest.raises(ValueError, match=r"parameters in two fragments: \['0.bias'\]"):
        fragments_of(trained, [model[0], model[2], ["0.bias"]])
    with pytest.raises(ValueError, match=r"a fragment names \['3.bias'\], which are no trained parameters"):
        fragments_of(trained, [model, ["3.bias"]])
    with pytest.raises(TypeError, match=r"a fragment is '0\.bias', expected a module or a list of names"):
        fragments_of(trained, ["0.bias"])
    with pytest.raises(ValueError, match="fragments is 0"):
        fragments_of(trained, 0)


def noise(seed, rank):
    return [np.random.default_rng([seed, rank, n]).normal(size=(STEPS, n)) + rank for n in SIZES]


def reference(m, tau, delay, α, η, β, seed):
    """All ranks at once, a fragment a parameter: x of all ranks after every step, and z."""
    shifts = [noise(seed, rank) for rank in range(m)]
    x = [np.zeros((m, n)) for n in SIZES]
    z, v = [np.zeros(n) for n in SIZES], [np.zeros(n) for n in SIZES]
    waiting, history = {}, []  # fragment -> when it is due, its mean

    def take(f):
        delta = z[f] - waiting.pop(f)[1]
        v[f] = β * v[f] + delta
        z[f] = z[f] - η * (delta + β * v[f])
        x[f] = α * x[f] + (1 - α) * z[f]

    for step in range(1, STEPS + 1):
        for f in range(len(SIZES)):
            x[f] = x[f] - 0.3 * (x[f] - np.array([shifts[rank][f][step - 1] for rank in range(m)]))
        done = (step - 1) % tau + 1
        for f in [f for f, (due, _) in waiting.items() if due == step]:
            take(f)
        for f in range(len(SIZES)):
            if max(1, (f + 1) * tau // len(SIZES)) == done:
                if f in waiting:
                    take(f)
                waiting[f] = (step + delay, x[f].mean(0))
                if not delay:
                    take(f)
        history.append(np.concatenate(x, axis=1))
    return np.array(history).transpose(1, 0, 2), np.concatenate(z)


@pytest.mark.slow
@given(
    st.sampled_from([1, 2, 3, 5]),
    st.integers(1, 9),
    st.integers(0, 10),
    st.floats(0.0, 0.9),
    st.floats(0.1, 0.9),
    st.floats(0.0, 0.9),
    st.integers(0, 99),
)
def test_recurrence(m, tau, delay, α, η, β, seed):
    def body(comm):
        ps = [nn.Parameter(torch.zeros(n, dtype=torch.float64)) for n in SIZES]
        outer = partial(torch.optim.SGD, lr=η, momentum=β, nesterov=β > 0)
        optimizer = StreamingDiLoCo(
            torch.optim.SGD(ps, lr=0.3), comm=comm, sync_every=tau, fragments=4, delay=delay, alpha=α, outer=outer
        )
        shifts, history = noise(seed, comm.rank), []
        for step in range(STEPS):
            for p, shift in zip(ps, shifts, strict=True):
                p.grad = p.detach() - torch.from_numpy(shift[step])
            optimizer.step()
            optimizer.average()
            history.append(torch.cat(ps).detach().numpy().copy())
        with optimizer.averaged_model():
            model = torch.cat(ps).detach().numpy().copy()
        optimizer.finish()
        return np.array(history), model, torch.cat(ps).detach().numpy().copy()

    expected, z = reference(m, tau, delay, α, η, β, seed)
    histories, models, ends = zip(*SimulatedWorld(m).run(body), strict=True)
    scale = np.abs(expected).max()
    np.testing.assert_allclose(np.array(histories), expected, rtol=1e-12, atol=1e-12 * scale)
    np.testing.assert_allclose(np.array(models), np.tile(z, (m, 1)), rtol=1e-12, atol=1e-12 * scale)
    assert all(np.array_equal(end, ends[0]) for end in ends)


def make(task, comm, algorithm=StreamingDiLoCo, **options):
    options = {"sync_every": 4, "fragments": 3, "delay": 2, **options} if algorithm is StreamingDiLoCo else options
    inner = torch.optim.Adam(task.model.parameters(), lr=0.1)
    return algorithm(inner, comm=comm, model=task.model, **options)


@pytest.mark.slow
@pytest.mark.parametrize("compress", [None, "int8"])
@pytest.mark.parametrize("bucket_bytes", [None, 20])
def test_one_fragment_at_once_is_diloco_in_bits(quadratic, compress, bucket_bytes):
    def body(comm, algorithm, **options):
        task = quadratic(comm.rank)
        both = {"sync_every": 3, "compress": compress, "bucket_bytes": bucket_bytes}
        optimizer = make(task, comm, algorithm, **both, **options)
        task.train(optimizer, range(11))
        x = task.flat().clone()
        optimizer.finish()
        return torch.stack([x, task.flat()])

    streaming = SimulatedWorld(3).run(lambda comm: body(comm, StreamingDiLoCo, fragments=1, delay=0, alpha=0.0))
    for one, other in zip(streaming, SimulatedWorld(3).run(lambda comm: body(comm, DiLoCo)), strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
@pytest.mark.few(5)
@pytest.mark.parametrize("compress", [None, "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("at", range(1, 9))
def test_resumed_runs_have_the_same_bits(quadratic, saved, at, compress, dtype):
    """At every step of two blocks: with none, one and several fragments under way."""

    def body(comm, stop):
        task = quadratic(comm.rank, dtype=dtype)
        optimizer = make(task, comm, compress=compress)
        for step in range(13):
            if step == stop:
                before = task.flat().clone()
                state, weights = saved(optimizer.state_dict()), saved(task.model.state_dict())
                assert torch.equal(task.flat(), before)  # nothing is applied early
                task = quadratic(comm.rank, dtype=dtype)
                optimizer = make(task, comm, compress=compress)
                task.model.load_state_dict(weights)
                optimizer.load_state_dict(state)
            task.train(optimizer, [step])
        x = task.flat().clone()
        optimizer.finish()
        return torch.stack([x, task.flat()])

    straight, resumed = (SimulatedWorld(2).run(lambda comm, s=stop: body(comm, s)) for stop in (None, at))
    for one, other in zip(straight, resumed, strict=True):
        assert torch.equal(one, other)


def test_weights_of_a_block_that_is_resumed(quadratic, saved):
    """By what a rank gave since each fragment's last launch, also before the checkpoint."""

    def body(comm, stop):
        task = quadratic(comm.rank)
        optimizer = make(task, comm, weighted=True)
        for step in range(9):
            if step == stop:
                state, weights = saved(optimizer.state_dict()), saved(task.model.state_dict())
                task = quadratic(comm.rank)
                optimizer = make(task, comm, weighted=True)
                task.model.load_state_dict(weights)
                optimizer.load_state_dict(state)
            task.backward(step)
            optimizer.step()
            optimizer.average(1.0 + step * comm.rank)
        optimizer.finish()
        return task.flat()

    straight, resumed = (SimulatedWorld(2).run(lambda comm, s=stop: body(comm, s)) for stop in (None, 6))
    assert torch.equal(straight[0], resumed[0])
    assert torch.equal(straight[1], resumed[1])


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5), st.integers(0, 4)), min_size=1, max_size=4),
    st.integers(1, 4),
    st.sampled_from(["keep", "average"]),
)
def test_ranks_end_and_go_on_as_they_like(quadratic, ranks, fragments, inner_state):
    """Each with its own steps, τ and delay; once more after the end. All hold the model, and nobody hangs."""

    def body(comm):
        steps, tau, _ = ranks[comm.rank]
        delay = ranks[0][2]
        task = quadratic(comm.rank)
        optimizer = make(task, comm, fragments=fragments, sync_every=tau, delay=delay, inner_state=inner_state)
        ends = []
        for begin in (0, steps):
            task.train(optimizer, range(begin, begin + steps))
            optimizer.finish()
            ends.append(task.flat().clone())
        return ends

    for ends in zip(*SimulatedWorld(len(ranks)).run(body), strict=True):
        assert all(torch.equal(end, ends[0]) for end in ends)


def test_drain_is_for_all_ranks_at_once(quadratic):
    def body(comm):
        task = quadratic(comm.rank)
        optimizer = make(task, comm)
        task.train(optimizer, range(3))
        if comm.rank == 0:
            with pytest.raises(RuntimeError, match=r"drain\(\) is for all ranks at the same point, but 1 of 2 went on"):
                optimizer.drain()
            raise ValueError("over")
        task.train(optimizer, range(3, 20))

    with pytest.raises(ValueError, match="over"):
        SimulatedWorld(2).run(body)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_drained_state_goes_on_at_any_number_of_ranks(quadratic, saved, size):
    def first(comm):
        task = quadratic(comm.rank)
        optimizer = make(task, comm)
        task.train(optimizer, range(6))
        optimizer.drain()
        return saved(optimizer.state_dict()), saved(task.model.state_dict())

    state, weights = SimulatedWorld(3).run(first)[1]

    def body(comm):
        task = quadratic(comm.rank)
        optimizer = make(task, comm)
        task.model.load_state_dict(weights)
        optimizer.load_state_dict(copy.deepcopy(state))
        task.train(optimizer, range(6, 12))
        optimizer.finish()
        return task.flat()

    ends = SimulatedWorld(size).run(body)
    assert all(torch.equal(end, ends[0]) for end in ends)


@pytest.mark.parametrize("compress", [None, "int8"])
def test_the_exchange_is_hidden_behind_the_delay(compress):
    """A link on which a fragment takes 1.2 s, steps of 1 s: hidden with a delay of two steps, not without."""

    def body(comm, delay):
        ps = [nn.Parameter(torch.zeros(1 << 12)) for _ in range(2)]
        sgd = torch.optim.SGD(ps, lr=0.1)
        optimizer = StreamingDiLoCo(sgd, comm=comm, sync_every=8, fragments=2, delay=delay, compress=compress)
        for _ in range(16):
            comm.elapse(1.0)
            optimizer.average()
        fraction = optimizer.hidden_fraction
        optimizer.finish()
        return fraction

    link = Link(alpha=0.6 if compress else 0.3, beta=0.0)
    assert SimulatedWorld(2, link).run(lambda comm: body(comm, 3)) == pytest.approx([1.0, 1.0])
    assert max(SimulatedWorld(2, link).run(lambda comm: body(comm, 0))) < 0.01


def test_ranks_with_other_fragments(quadratic):
    def body(comm):
        make(quadratic(comm.rank), comm, fragments=[["a", "b"], ["c"]] if comm.rank else [["a"], ["b", "c"]])

    with pytest.raises(CollectiveError, match=r"2 fragments [0-9a-f]{8}"):
        SimulatedWorld(2).run(body)


def test_bad_input(quadratic, saved):
    def body(comm):
        task = quadratic(comm.rank)
        with pytest.raises(ValueError, match="delay is -1"):
            make(task, comm, delay=-1)
        with pytest.raises(TypeError, match=r"delay is 1\.5"):
            make(task, comm, delay=1.5)
        with pytest.raises(ValueError, match="expected 0 ≤ alpha < 1"):
            make(task, comm, alpha=1.0)
        with pytest.raises(ValueError, match="native=True waits for the transport"):
            make(task, comm, native=True)
        state = saved(make(task, comm, fragments=2).state_dict())
        with pytest.raises(ValueError, match="the state is of 2 fragments, this is of 3"):
            make(task, comm).load_state_dict(state)
        with pytest.raises(ValueError, match="the state is of a fragment of"):
            make(task, comm, fragments=[["a", "c"], ["b"]]).load_state_dict(state)

    SimulatedWorld(1).run(body)


def test_nan_is_named(quadratic):
    def body(comm):
        task = quadratic(comm.rank)
        optimizer = make(task, comm, fragments=[["a"], ["b"], ["c"]], delay=2)
        if comm.rank == 1:
            task.model["b"].grad = torch.full_like(task.model["b"], float("nan"))
        optimizer.step()
        optimizer.average()
        optimizer.average()
        optimizer.average()  # the second of three fragments was launched after two of four steps, and is applied
        with pytest.raises(CollectiveError, match=r"not finite in 'b'; NaN or inf in the parameters of ranks \[1\]"):
            optimizer.average()

    SimulatedWorld(2).run(body)
