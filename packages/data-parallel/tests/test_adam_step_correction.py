"""Adam's steps by ranks' own gradients: their mean is as long as the step by the mean gradient."""

import copy
import warnings

import pytest
import torch
from communicators import CollectiveError, Link, SimulatedWorld
from data_parallel import DistributedOptimizer, UpdateOptimizer, reshard_residuals
from data_parallel.adam_step_correction import CORRECTED, EVERY, WIDTH, _common_and_whole, sketch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

ADAMS = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.01),
    "nadam": lambda parameters: torch.optim.NAdam(parameters, lr=0.01, weight_decay=0.01, decoupled_weight_decay=True),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, momentum=0.5),
}
NUMEL = 4000


def path(size, optimizer, signal, steps=60, *, dtype=torch.float32, seed=0, turns=False, alike=False, **options):
    """Parameters of `size` ranks after the last steps, and of dense training; gradients are signal + noise of 1.

    turns: the signal's sign, from step to step. alike: all ranks have the same noise.
    """
    generator = torch.Generator().manual_seed(seed)
    direction = torch.randn(NUMEL, generator=generator).sign()
    gradients = []
    for step in range(steps):
        noise = torch.randn(1 if alike else size, NUMEL, generator=generator).expand(size, -1)
        gradients.append(signal * direction * (-1 if turns and step % 2 else 1) + noise)

    def body(comm):
        p = nn.Parameter(torch.ones(NUMEL, dtype=dtype))
        wrapper = UpdateOptimizer(ADAMS[optimizer]([p]), [("p", p)], comm=comm, **options)
        for gradient in gradients:
            p.grad = gradient[comm.rank].to(dtype)
            wrapper.step()
        return p.detach(), wrapper.state_dict()["distributed"]["residuals"]["p"]

    dense = nn.Parameter(torch.ones(NUMEL, dtype=dtype))
    alone = ADAMS[optimizer]([dense])
    for gradient in gradients:
        dense.grad = gradient.mean(0).to(dtype)
        alone.step()
    return SimulatedWorld(size).run(body), dense.detach()


@pytest.mark.few(2)
@pytest.mark.parametrize("optimizer", ADAMS)
@pytest.mark.parametrize("signal", [0.0, 0.3, 10.0])
@pytest.mark.parametrize("size", [2, 8])
@pytest.mark.parametrize("turns", [False, True])
def test_all_sent_it_moves_as_far_as_with_dense_gradients(optimizer, size, signal, turns):
    """Also where a signal that all ranks share turns round, which one rank's moments cannot tell from noise."""
    results, dense = path(size, optimizer, signal, turns=turns, density=1.0)
    moved, meant = results[0][0] - 1, dense - 1
    if turns and signal > 1:  # nothing is left but the first steps
        assert float((moved - meant).norm()) < 0.1
    else:
        assert float(moved.norm() / meant.norm()) == pytest.approx(
            1, rel=0.12 if turns or optimizer == "rmsprop" else 0.06
        )
        assert float(moved @ meant / moved.norm() / meant.norm()) > 0.85


@pytest.mark.few(4)
@pytest.mark.parametrize("optimizer", ADAMS)
@pytest.mark.parametrize("size", [2, 3, 5])
def test_ranks_with_the_same_gradients_go_as_one(optimizer, size):
    results, dense = path(size, optimizer, 0.1, steps=20, density=1.0, alike=True, dtype=torch.float64)
    torch.testing.assert_close(results[0][0], dense, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("optimizer", ADAMS)
def test_one_rank_is_left_as_it_is(optimizer):
    results, dense = path(1, optimizer, 0.1, steps=5, density=1.0, dtype=torch.float64)
    torch.testing.assert_close(results[0][0], dense, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("optimizer", ADAMS)
def test_without_any_noise_nothing_is_changed(optimizer):
    """Gradients that are the same in all steps: f is 1, whatever the number of ranks."""

    def body(comm):
        p = nn.Parameter(torch.ones(9, dtype=torch.float64))
        plain = copy.deepcopy(p)
        alone = ADAMS[optimizer]([plain])
        options = {"comm": comm, "density": 1.0}
        wrapper = UpdateOptimizer(ADAMS[optimizer]([p]), [("p", p)], **options)
        for _ in range(8):
            p.grad = plain.grad = torch.arange(-4.0, 5.0, dtype=torch.float64)
            wrapper.step()
            alone.step()
        return p.detach(), plain.detach()

    torch.testing.assert_close(*SimulatedWorld(4).run(body)[0], rtol=1e-6, atol=1e-6)


@given(size=st.sampled_from([2, 3]), density=st.sampled_from([0.01, 0.3]), seed=st.integers(0, 99))
@pytest.mark.filterwarnings("ignore:the gradients of this step were made")
def test_what_is_applied_and_what_waits_are_the_lengthened_updates(size, density, seed):
    """P · applied + Σ residuals is the same at any density, where gradients are."""
    sparse, _ = path(size, "adam", 0.1, steps=6, density=density, dtype=torch.float64, seed=seed)
    whole, _ = path(size, "adam", 0.1, steps=6, density=1.0, dtype=torch.float64, seed=seed)
    assert all(torch.equal(p, sparse[0][0]) for p, _ in sparse)
    total = size * (sparse[0][0] - 1) + sum(residual for _, residual in sparse)
    torch.testing.assert_close(total, size * (whole[0][0] - 1), rtol=1e-9, atol=1e-12)


def test_decoupled_weight_decay_is_as_long_as_ever():
    """Of noise alone, by which elements go up as often as down, the mean over elements is what the decay makes."""

    def body(comm):
        p = nn.Parameter(torch.ones(NUMEL, dtype=torch.float64))
        inner = torch.optim.AdamW([p], lr=0.01, weight_decay=1.0)
        wrapper = UpdateOptimizer(inner, [("p", p)], comm=comm, density=1.0)
        generator = torch.Generator().manual_seed(comm.rank)
        for _ in range(20):
            p.grad = torch.randn(NUMEL, dtype=torch.float64, generator=generator)
            wrapper.step()
        return p.detach()

    results = SimulatedWorld(4).run(body)
    assert float(results[0].mean()) == pytest.approx(0.99**20, rel=0.005)


@pytest.mark.parametrize("size", [1, 4])
def test_decay_that_16_bits_round_off_does_not_come_back_as_growth(size):
    """AdamW's decay is less than half a step of bfloat16 here, so that on one rank nothing happens."""

    def body(comm):
        p = nn.Parameter(torch.ones(NUMEL, dtype=torch.bfloat16))
        inner = torch.optim.AdamW([p], lr=1e-3, weight_decay=0.1)
        wrapper = UpdateOptimizer(inner, [("p", p)], comm=comm, density=1.0)
        generator = torch.Generator().manual_seed(comm.rank)
        for _ in range(30):
            p.grad = torch.randn(NUMEL, generator=generator).to(torch.bfloat16)
            wrapper.step()
        return float(p.detach().double().mean()) + float(
            wrapper.state_dict()["distributed"]["residuals"]["p"].double().mean()
        )

    assert max(SimulatedWorld(size).run(body)) <= 1


def test_of_16_and_32_bits_together_each_has_its_own_decay():
    """Also where the rate is a tensor."""

    def body(comm, rate, dtypes):
        model = nn.ParameterDict({f"{n}": torch.ones(NUMEL, dtype=dtype) for n, dtype in enumerate(dtypes)})
        inner = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.5, foreach=False)
        wrapper = UpdateOptimizer(inner, model.named_parameters(), comm=comm, density=1.0)
        generator = torch.Generator().manual_seed(comm.rank)
        for _ in range(5):
            for p in model.values():
                p.grad = torch.randn(NUMEL, generator=generator).to(p.dtype)
            wrapper.step()
        return [p.detach().double().mean().item() for p in model.values()]

    both = [torch.float32, torch.bfloat16]
    [given] = {str(one) for one in SimulatedWorld(2).run(lambda comm: body(comm, 0.01, both))}
    [tensor] = {str(one) for one in SimulatedWorld(2).run(lambda comm: body(comm, torch.tensor(0.01), both))}
    assert given == tensor


def made(comm, *, kind="adam", numel=NUMEL, **options):
    p = nn.Parameter(torch.zeros(numel))
    options = {"density": 1.0, **options}
    return p, UpdateOptimizer(ADAMS[kind]([p]), [("p", p)], comm=comm, **options)


def noise_of(wrapper):
    own = wrapper.state_dict()["distributed"]["own_noise"]
    return own["sums"].tolist(), own["looks"].tolist()


def go(p, wrapper, steps, *, first=0):
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(97 * step + wrapper.comm.rank)
        p.grad = torch.randn(p.shape, generator=generator) + 0.5
        wrapper.step()


@given(size=st.sampled_from([2, 3, 5, 8]), numel=st.sampled_from([1, 255, 256, 70_000]), steps=st.integers(1, 20))
def test_what_is_measured_is_the_same_on_all_ranks_and_goes_on_from_a_state(size, numel, steps):
    def body(comm):
        p, wrapper = made(comm, numel=numel)
        go(p, wrapper, steps)
        state, kept = copy.deepcopy(wrapper.state_dict()), p.detach().clone()
        go(p, wrapper, 9, first=steps)
        again, other = made(comm, numel=numel)
        other.load_state_dict(state)
        with torch.no_grad():
            again.copy_(kept)
        go(again, other, 9, first=steps)
        assert torch.equal(p, again)
        assert noise_of(wrapper) == noise_of(other)
        return noise_of(wrapper)[0]

    first, *others = SimulatedWorld(size).run(body)
    assert others == [first] * (size - 1)


@pytest.mark.few(0)
def test_the_share_of_signal_does_not_depend_on_the_number_of_ranks():
    def body(comm):
        p, wrapper = made(comm)
        go(p, wrapper, 25 * EVERY)
        common, whole = noise_of(wrapper)[0]
        return common / whole

    shares = [SimulatedWorld(size).run(body)[0] for size in (2, 4, 8)]
    assert shares == pytest.approx([0.2] * 3, abs=0.05)  # 0.5² of 0.5² + 1


@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_taken_in(nonfinite, bad):
    def body(comm):
        p, wrapper = made(comm, nonfinite=nonfinite)
        go(p, wrapper, 8)
        before = noise_of(wrapper)
        p.grad = torch.ones_like(p)
        if comm.rank == 1:
            p.grad[3] = bad
        if nonfinite == "raise":
            with pytest.raises(CollectiveError):
                wrapper.step()
            assert torch.tensor(noise_of(wrapper)[0]).isfinite().all()  # of the steps before
            p.grad = torch.ones_like(p)
            wrapper.step()
        else:
            wrapper.step()
            assert wrapper.skipped == 1
            assert noise_of(wrapper) == before
        for looks in noise_of(wrapper):
            assert torch.tensor(looks).isfinite().all()

    SimulatedWorld(3).run(body)


def test_a_step_that_is_skipped_leaves_no_trace_where_gradients_were_finite():
    """Where the update is not: a rate of inf in the step in which ranks look."""

    def body(comm):
        p, wrapper = made(comm, nonfinite="skip")
        go(p, wrapper, 8)
        before = noise_of(wrapper)
        wrapper.param_groups[0]["lr"] = float("inf")
        go(p, wrapper, 1, first=8)
        assert wrapper.skipped == 1
        assert noise_of(wrapper) == before

    SimulatedWorld(2).run(body)


def test_ranks_speak_of_it_every_few_steps():
    """Beside the exchange of all: a row of `WIDTH` numbers and two of 8 bytes a step, and what stamps two messages."""

    def body(comm):
        p, wrapper = made(comm, kind="adamw")
        go(p, wrapper, 1)
        sent = []
        for step in range(1, 2 * EVERY):
            before = comm.bytes_sent
            go(p, wrapper, 1, first=step)
            sent.append(comm.bytes_sent - before)
        return sent

    sent = SimulatedWorld(2).run(body)[0]
    more = [nbytes - min(sent) for nbytes in sent]
    assert {step for step, nbytes in enumerate(more, 1) if nbytes} == {EVERY}
    assert 0 <= more[EVERY - 1] - 8 * EVERY * (WIDTH + 2) <= 64


@pytest.mark.parametrize("size", [2, 3, 8])
def test_nobody_waits_for_it_before_the_exchange(size):
    """The optimizer steps when the step begins; the sum has come by its end, and goes into the next step."""

    def body(comm):
        p, wrapper = made(comm, kind="adamw")
        steps, signals = [], []
        wrapper.optimizer.register_step_pre_hook(
            lambda *_: steps.append((comm.clock(), wrapper._step_correction.signal))
        )
        for step in range(2 * EVERY):
            before = comm.clock()
            go(p, wrapper, 1, first=step)
            assert steps[-1][0] == before < comm.clock()
            signals.append(wrapper._step_correction.signal)
        assert [signal for _, signal in steps] == [1.0, *signals[:-1]]
        assert signals[0] < 1
        assert len(set(signals)) == 2

    SimulatedWorld(size, Link(alpha=1.0, beta=0.0)).run(body)


def test_a_sum_of_a_step_that_failed_does_not_go_into_a_state_that_is_loaded():
    def body(comm):
        p, wrapper = made(comm, kind="adamw")
        go(p, wrapper, EVERY)
        state, before = copy.deepcopy(wrapper.state_dict()), noise_of(wrapper)
        fails = wrapper.optimizer.register_step_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            go(p, wrapper, 1, first=EVERY)
        fails.remove()
        wrapper.load_state_dict(state)
        wrapper._step_correction.wait()
        assert noise_of(wrapper) == before

    SimulatedWorld(2).run(body)


@pytest.mark.few(2)
@pytest.mark.parametrize(("optimizer", "size"), [("adam", 2), ("adamw", 8), ("rmsprop", 8)])
@pytest.mark.parametrize("common", ["falls", "first", "spike 40", "spike 41"])
def test_steps_are_as_long_as_dense_ones_where_gradients_change(optimizer, size, common):
    """From step 60 on. All steps count alike, whenever ranks speak: a spike lies in the second moment for long."""
    steps = 160
    sizes = [10.0 if {"first": 0, "spike 40": 40, "spike 41": 41}.get(common) == s else 0.1 for s in range(steps)]
    if common == "falls":
        sizes = [10 / (1 + s) for s in range(steps)]
    generator = torch.Generator().manual_seed(1)
    direction = torch.randn(NUMEL, generator=generator).sign()
    noise = torch.randn(steps, size, NUMEL, generator=generator)
    gradients = noise + torch.tensor(sizes)[:, None, None] * direction

    def body(comm):
        p, wrapper = made(comm, kind=optimizer)
        for step in range(steps):
            p.grad = gradients[step, comm.rank].clone()
            wrapper.step()
            if step == 59:
                before = p.detach().clone()
        return p.detach() - before

    p = nn.Parameter(torch.zeros(NUMEL))
    alone = ADAMS[optimizer]([p])
    for step in range(steps):
        p.grad = gradients[step].mean(0)
        alone.step()
        if step == 59:
            before = p.detach().clone()
    moved = SimulatedWorld(size).run(body)[0]
    assert float(moved.norm() / (p.detach() - before).norm()) == pytest.approx(1, rel=0.08)


def test_a_rank_without_gradients_is_no_noise():
    """As one that has joined others with fewer steps: what the others share is shared by all that have any."""

    def body(comm):
        p, wrapper = made(comm)
        for step in range(2 * EVERY):
            p.grad = None if comm.rank == 2 else torch.full_like(p, 1.0 + step)
            wrapper.step()
        return noise_of(wrapper)[0]

    common, whole = SimulatedWorld(3).run(body)[0]
    assert common == pytest.approx(whole)


def test_another_number_of_ranks_goes_on_with_what_was_found_and_no_rank_s_looks():
    def body(comm):
        p, wrapper = made(comm)
        go(p, wrapper, 11)
        return copy.deepcopy(wrapper.state_dict())

    states = SimulatedWorld(2).run(body)
    for state in reshard_residuals(states, size=3):
        own = state["distributed"]["own_noise"]
        assert torch.equal(own["sums"], states[0]["distributed"]["own_noise"]["sums"])
        assert not own["looks"].any()


@pytest.mark.parametrize(
    ("kind", "wrapping"), [(torch.optim.SGD, UpdateOptimizer), (torch.optim.AdamW, DistributedOptimizer)]
)
@pytest.mark.filterwarnings("ignore:AdamW behind")
def test_where_nothing_is_measured_nothing_is_kept(kind, wrapping):
    def body(comm):
        p = nn.Parameter(torch.zeros(3))
        wrapper = wrapping(kind([p]), [("p", p)], comm=comm)
        return "own_noise" in wrapper.state_dict()["distributed"]

    assert SimulatedWorld(2).run(body) == [False, False]


def test_every_corrected_kind_is_named_itself():
    """In torch 2.6 an AdamW is no Adam."""
    assert {torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RMSprop} == set(CORRECTED)


@given(
    numels=st.lists(st.sampled_from([0, 1, 255, 256, 257, 4097, 70_001]), min_size=1, max_size=4),
    start=st.integers(0, 2**31),
)
def test_a_sketch_is_linear_and_takes_each_element_in_once_in_so_many_steps(numels, start):
    parameters = [nn.Parameter(torch.zeros(numel)) for numel in numels]
    generator = torch.Generator().manual_seed(start)
    found = []
    a, b = ([torch.randn(numel, generator=generator) for numel in numels] for _ in range(2))
    for gradients in (a, b, [x + y for x, y in zip(a, b, strict=True)]):
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient
        found.append(sketch(parameters, start))
    torch.testing.assert_close(found[0] + found[1], found[2], rtol=1e-4, atol=1e-3)
    for p in parameters:
        for place in range(0, p.numel(), max(1, p.numel() // 3)):
            for other in parameters:
                other.grad = None
            p.grad = torch.zeros_like(p)
            p.grad[place] = 3.0
            squares = [float(sketch(parameters, step).square().sum()) for step in range(start, start + EVERY)]
            assert sorted(squares) == [0.0] * (EVERY - 1) + [9.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_squares_of_sketches_sum_up_to_the_norm(dtype):
    """Also where all elements are of one sign, and where they are not in the order of memory."""
    p = nn.Parameter(torch.zeros(300, 700, dtype=dtype))
    for gradient in (torch.ones(300, 700), torch.rand(700, 300).T + 0.1, torch.randn(300, 700)):
        p.grad = gradient.to(dtype)
        found = torch.stack([sketch([p], step).square().sum() for step in range(100 * EVERY)]).view(-1, EVERY).sum(1)
        found = found / p.grad.double().square().sum()
        assert float(found.mean()) == pytest.approx(1, abs=0.04)
        assert float(found.std()) < 0.3


def test_lbfgs_is_refused():
    p = nn.Parameter(torch.zeros(3))
    for kind in (UpdateOptimizer, DistributedOptimizer):
        with pytest.raises(TypeError, match=f"LBFGS asks .* for which {kind.__name__} takes one"):
            kind(torch.optim.LBFGS([p]), [("p", p)], comm=SimulatedWorld(1).run(lambda c: c)[0])


@pytest.mark.parametrize("kind", [torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adamax, torch.optim.RAdam])
def test_others_that_divide_by_the_size_of_gradients_are_warned_about(kind):
    def body(comm):
        model = nn.Linear(2, 2)
        with pytest.warns(UserWarning, match=rf"{kind.__name__}.*up to 1\.4 times too short"):
            UpdateOptimizer(kind(model.parameters()), model.named_parameters(), comm=comm)

    SimulatedWorld(2).run(body)


@pytest.mark.parametrize(
    ("kind", "size"),
    [(torch.optim.SGD, 2), (torch.optim.AdamW, 2), (torch.optim.RMSprop, 2), (torch.optim.Adamax, 1)],
)
def test_where_nothing_is_too_short_nobody_is_warned(kind, size):
    def body(comm):
        model = nn.Linear(2, 2)
        UpdateOptimizer(kind(model.parameters()), model.named_parameters(), comm=comm)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SimulatedWorld(size).run(body)


def test_a_step_that_one_rank_alone_has_looked_at_tells_nothing():
    """Of one gradient nothing can be said to be common."""
    looks = torch.zeros(EVERY, WIDTH + 2, dtype=torch.float64)
    looks[0, 0], looks[0, -2], looks[0, -1] = 6.0, 18.0, 2
    both = _common_and_whole(looks).tolist()
    assert both == [9.0, 9.0]
    looks[1, 0], looks[1, -2], looks[1, -1] = 5.0, 25.0, 1
    assert _common_and_whole(looks).tolist() == both
