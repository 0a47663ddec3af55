"""NaN and inf in what ranks give: the total shows them on every rank, and no state learns from them."""

import copy

import pytest
import torch
from communicators import SimulatedWorld, testing
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_collectives import ALGORITHMS, WIRES, sparse_allreduce
from sparse_collectives.algorithms.table import resolve
from sparse_compress import topk

pytestmark = pytest.mark.quick

PATTERNS = [0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF]  # inf, and NaN with several payloads
BAD = st.sampled_from([*PATTERNS, *(bits - (1 << 31) for bits in PATTERNS)])  # both signs


def drawn_options(draw, name, size):
    """Settings of the algorithm, those that keep a state short-lived among them: small numbers, where they fit."""
    entry = ALGORITHMS[name]
    drawn = {
        option: draw(st.sampled_from([default, *range(1, size + 1)]), label=option)
        for option, default in entry.options.items()
        if isinstance(default, int)
    }
    try:
        resolve(name, drawn, size=size)
    except ValueError:
        return draw(st.sampled_from(entry.variants(size)))
    return drawn


def drawn_input(draw, n, *, spoilt):
    """Random, tied or zero values, with some that are not finite."""
    seed = draw(st.integers(0, 99))
    values = torch.randn(n, generator=torch.Generator().manual_seed(seed)).numpy()
    kind = draw(st.sampled_from(["random", "ties", "zeros"]))
    x = {"random": torch.from_numpy(values), "ties": torch.ones(n), "zeros": torch.zeros(n)}[kind].clone()
    if spoilt:
        for at in draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=n)):
            x.view(torch.int32)[at] = draw(BAD)
    return x


def one_call(inputs, k, states, name, options, wire="fp32", *, prescribed):
    """The results of one call; prescribed: select as the algorithm says, where it does."""
    size = len(inputs)
    entry = resolve(name, options, size=size)

    def body(comm):
        x, state = inputs[comm.rank], states[comm.rank]
        sent = entry.select(x, comm.rank, size, k, state)(x) if entry.prescribes and prescribed else topk(x, k)
        return sparse_allreduce(sent, comm, k=k, algorithm=name, options=options, wire=wire, state=state)

    return SimulatedWorld(size).run(body)


def initial_states(name, size):
    return [ALGORITHMS[name].initial_state() for _ in range(size)]


@pytest.mark.few(4)
@pytest.mark.parametrize("name", ALGORITHMS)
@settings(max_examples=settings.default.max_examples // 2)
@given(data=st.data())
def test_what_is_not_finite_on_any_rank_is_in_the_total_of_all(name, data):
    """Over several calls with one state: earlier ones, finite or not, may hide nothing."""
    size, n = data.draw(testing.world_sizes(8)), data.draw(st.integers(1, 30))
    k, wire = (
        data.draw(st.integers(1, 3)),
        data.draw(st.sampled_from(list(WIRES))) if ALGORITHMS[name].selects else "fp32",
    )
    options, states = drawn_options(data.draw, name, size), initial_states(name, size)
    for _ in range(4):
        spoilt = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
        inputs = [drawn_input(data.draw, n, spoilt=one) for one in spoilt]
        results = one_call(inputs, k, states, name, options, wire, prescribed=data.draw(st.booleans()))
        finite = [bool(result.total.values.isfinite().all()) for result in results]
        assert finite == [not any(spoilt)] * size


@pytest.mark.parametrize("name", [name for name, entry in ALGORITHMS.items() if entry.initial_state() is not None])
@settings(max_examples=settings.default.max_examples // 2)
@given(data=st.data())
def test_a_state_does_not_learn_from_what_is_not_finite(name, data):
    """Calls that follow see what they would have seen without that call, but for what no data have a say in: a count
    of calls."""
    size, n = data.draw(testing.world_sizes(8)), data.draw(st.integers(1, 30))
    k, options = data.draw(st.integers(1, 9)), drawn_options(data.draw, name, size)
    states = initial_states(name, size)
    for _ in range(data.draw(st.integers(0, 3))):
        inputs = [drawn_input(data.draw, n, spoilt=False) for _ in range(size)]
        one_call(inputs, k, states, name, options, prescribed=True)
    before = copy.deepcopy(states)
    culprit = data.draw(st.integers(0, size - 1))
    inputs = [drawn_input(data.draw, n, spoilt=rank == culprit) for rank in range(size)]
    one_call(inputs, k, states, name, options, prescribed=True)
    after = []
    for factor in (1, -100):  # finite calls that have little in common
        others = copy.deepcopy(before)
        finite = [factor * drawn_input(data.draw, n, spoilt=False) for _ in range(size)]
        one_call(finite, k, others, name, options, prescribed=True)
        after.append(others)
    for state, kept, one, other in zip(states, before, *after, strict=True):
        for key, value in state.items():
            assert value == kept[key] or value == one[key] == other[key], key


@pytest.mark.parametrize("spoilt_call", [0, 32])
def test_oktopk_goes_on_after_a_renewal_that_saw_nan(spoilt_call):
    """It sent nothing until the next renewal, 31 calls later."""
    states = initial_states("oktopk", 2)
    for call in range(40):
        x = torch.randn(200, generator=torch.Generator().manual_seed(call))
        inputs = [torch.full((200,), torch.nan) if call == spoilt_call else x, 2 * x]
        results = one_call(inputs, 8, states, "oktopk", {"thresholds_every": 32}, prescribed=True)
        assert len(results[0].total) > 0
