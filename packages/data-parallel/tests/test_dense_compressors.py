"""PowerSGD and the int8 sum obey the laws: conservation, agreement, worlds, bytes, all or none, resume, equivalence."""

import copy
import time

import pytest
import torch
from communicators import CollectiveError, SimulatedWorld
from data_parallel import DistributedOptimizer, SparseHookState, reshard_residuals
from data_parallel.schemes.dense_int8 import DenseInt8
from data_parallel.schemes.gram_schmidt import orthonormal, outer_sum
from data_parallel.schemes.powersgd import PowerSGD, powersgd_elements, powersgd_sent
from data_parallel.testing import check_dense_laws
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_collectives import Traffic
from torch import nn

pytestmark = pytest.mark.quick

SHAPES = {"matrix": (30, 40), "vector": (7,), "filters": (8, 3, 3, 3), "flat": (2, 3), "scalar": ()}
SIZES = [1, 2, 3, 5, 8]
NAMES = ["powersgd", "dense-int8"]
either = pytest.mark.parametrize("name", NAMES)


def low_rank_at_once(options):
    """PowerSGD from the first step on, unless a test is about its dense steps."""
    if options.get("algorithm") != "powersgd":
        return options
    return {**options, "options": {"dense_steps": 0, **options.get("options", {})}}


def make(comm, *, shapes=SHAPES, dtype=torch.float32, lr=1.0, **options):
    options = low_rank_at_once(options)
    model = nn.ParameterDict({name: nn.Parameter(torch.zeros(shape, dtype=dtype)) for name, shape in shapes.items()})
    inner = torch.optim.SGD(model.parameters(), lr=lr)
    return model, DistributedOptimizer(inner, model.named_parameters(), comm=comm, **options)


def integers(shape, generator):
    return torch.randint(-99, 100, shape, generator=generator).float()


def normal(shape, generator):
    return torch.randn(shape, generator=generator)


def flat(tensors):
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def train(comm, *, steps, seed=0, draw=integers, saved=None, bad=(), backwards=1, parts=False, **options):
    """Σ of its gradients, −P · parameters, its residuals; the optimizer."""
    model, optimizer = make(comm, **options)
    if saved is not None:
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
    whole = [torch.zeros(p.shape) for p in model.values()]
    for step in steps:
        generator = torch.Generator().manual_seed(1000 * seed + 100 * step + comm.rank)
        optimizer.zero_grad()
        gradients = [draw(p.shape, generator) for p in model.values()]
        for turn in range(backwards):
            loss = sum((p * g).sum() for p, g in zip(model.values(), gradients, strict=True))
            if turn < backwards - 1:
                with optimizer.no_sync():
                    loss.backward()
            else:
                loss.backward()
        if step in bad:
            if comm.rank == comm.size - 1:
                model["matrix"].grad[1, 1] = torch.inf
        else:
            whole = [w + backwards * g for w, g in zip(whole, gradients, strict=True)]
        optimizer.step()
    state = copy.deepcopy((dict(model.state_dict()), optimizer.state_dict()))
    residuals = optimizer.state_dict()["distributed"]["residuals"]
    rests = flat(residuals.get(name, torch.zeros_like(p)).double() for name, p in model.items())
    return flat(whole).double(), -comm.size * flat(model.values()).double(), rests, state


def own_options(name, dense_steps):
    return {"options": {"dense_steps": dense_steps}} if name == "powersgd" else {}


@pytest.mark.slow
@either
@settings(max_examples=12)
@given(
    size=st.sampled_from(SIZES),
    seed=st.integers(0, 99),
    steps=st.integers(1, 4),
    bucket_bytes=st.sampled_from([None, 100, 4000]),
    backwards=st.integers(1, 2),
    overlap=st.booleans(),
    dense_steps=st.integers(0, 3),
)
def test_nothing_is_lost_and_all_agree(name, size, seed, steps, dense_steps, **options):
    """Σ gradients = P · Σ means + Σ residuals: within rounding; parameters have the same bits on every rank."""
    options |= own_options(name, dense_steps)
    results = SimulatedWorld(size).run(
        lambda comm: train(comm, algorithm=name, steps=range(steps), seed=seed, draw=normal, **options)
    )
    inputs, rests = (sum(result[i] for result in results) for i in (0, 2))
    for _, applied, _, _ in results:
        assert torch.equal(applied, results[0][1])
        torch.testing.assert_close(inputs, applied + rests, rtol=0, atol=2e-5 * size)


@pytest.mark.slow
@settings(max_examples=8)
@given(
    size=st.sampled_from([1, 2, 4, 8]),  # so that total / P is exact
    seed=st.integers(0, 99),
    steps=st.integers(1, 5),
    bucket_bytes=st.sampled_from([None, 100, 4000]),
    bad=st.sets(st.integers(0, 4)),
)
def test_int8_loses_nothing_at_all(size, seed, steps, **options):
    """Integer gradients: exactly, over skipped steps too."""
    results = SimulatedWorld(size).run(
        lambda comm: train(comm, algorithm="dense-int8", nonfinite="skip", steps=range(steps), seed=seed, **options)
    )
    inputs, rests = (sum(result[i] for result in results) for i in (0, 2))
    for _, applied, _, _ in results:
        assert torch.equal(inputs, applied + rests)
    assert size == 1 or rests.any() or steps == len(options["bad"] & set(range(steps)))


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("columns", [1, 2, 4])
def test_powersgd_sends_what_its_expression_says(size, columns):
    world = SimulatedWorld(size)
    options = {"algorithm": "powersgd", "options": {"rank": columns}, "steps": range(1)}
    start = SimulatedWorld(size)
    start.run(lambda comm: train(comm, **{**options, "steps": ()}))  # rank 0's parameters
    world.run(lambda comm: train(comm, **options))
    shapes = [torch.Size(shape) for shape in SHAPES.values()]
    sent = [powersgd_sent(rank, size, shapes, columns) for rank in range(size)]
    difference = [after - before for after, before in zip(world.bytes_sent, start.bytes_sent, strict=True)]
    assert difference == [traffic.nbytes for traffic in sent]
    messages = [after - before for after, before in zip(world.messages_sent, start.messages_sent, strict=True)]
    assert messages == [traffic.messages for traffic in sent]


@pytest.mark.slow
@pytest.mark.few(16)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("numel", [1, 1023, 1024, 1025, 5000, 20_000])
def test_int8_sends_what_its_expression_says(size, numel):
    worlds = SimulatedWorld(size), SimulatedWorld(size)
    for world, steps in zip(worlds, ((), range(1)), strict=True):
        world.run(lambda comm, steps=steps: train(comm, algorithm="dense-int8", steps=steps, shapes={"a": (numel,)}))
    sent = [Traffic.quantised(numel, rank, size) for rank in range(size)]
    assert [b - a for a, b in zip(worlds[0].bytes_sent, worlds[1].bytes_sent, strict=True)] == [t.nbytes for t in sent]
    messages = [b - a for a, b in zip(worlds[0].messages_sent, worlds[1].messages_sent, strict=True)]
    assert messages == [traffic.messages for traffic in sent]


@pytest.mark.slow
@pytest.mark.few(3)
@pytest.mark.parametrize("bucket_bytes", [None, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("dense_steps", range(4))
def test_laws_of_powersgd(dense_steps, dtype, bucket_bytes):
    """Also where it was stopped, or a step skipped, before, amid or after the steps that it sums dense."""
    own = PowerSGD(dense_steps=dense_steps)
    check_dense_laws(lambda: own, sizes=[1, 3, 4], dtype=dtype, bucket_bytes=bucket_bytes)


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("settings", [{}, {"bucket_bytes": 100}, {"overlap": True}], ids=str)
def test_laws_of_int8(settings):
    check_dense_laws(DenseInt8, atol=0.0, **settings)


@either
def test_the_rank_and_parameter_of_a_nan_are_named_on_every_rank(name):
    def body(comm):
        with pytest.raises(CollectiveError, match="rank 2: the gradient of 'matrix' is not finite") as error:
            train(comm, algorithm=name, steps=[0], bad={0})
        return str(error.value)

    assert len(set(SimulatedWorld(3).run(body))) == 1


@pytest.mark.parametrize(
    ("mine", "others", "says"),
    [
        ({"algorithm": "powersgd", "options": {"rank": 1}}, {"algorithm": "powersgd"}, "rank=1"),
        ({"algorithm": "powersgd", "options": {"dense_steps": 1}}, {"algorithm": "powersgd"}, "dense_steps=1"),
        ({"algorithm": "powersgd"}, {"algorithm": "dense-int8"}, "dense-int8"),
        ({"algorithm": "dense"}, {"algorithm": "dense-int8"}, "dense-int8"),
    ],
)
def test_other_settings_on_a_rank_are_named_on_all(mine, others, says):
    def body(comm):
        with pytest.raises(CollectiveError, match=says):
            train(comm, steps=[0], **(mine if comm.rank == 1 else others))
        return True

    assert all(SimulatedWorld(3).run(body))


@pytest.mark.slow
@settings(max_examples=10)
@given(size=st.sampled_from(SIZES), seed=st.integers(0, 99))
def test_at_full_rank_powersgd_is_the_dense_sum(size, seed):
    """Then P and Q would be no fewer elements, and matrices go whole."""

    def run(**options):
        options = {"steps": range(3), "seed": seed, "shapes": {"a": (6, 9), "b": (4,)}, "draw": normal, **options}
        return SimulatedWorld(size).run(lambda comm: train(comm, **options))

    runs = run(algorithm="powersgd", options={"rank": 6}), run(algorithm="dense")
    for one, dense in zip(*runs, strict=True):
        assert not one[2].any()
        torch.testing.assert_close(one[1], dense[1], rtol=0, atol=1e-5 * size)


@settings(max_examples=10)
@given(size=st.sampled_from(SIZES), seed=st.integers(0, 99), rank=st.integers(1, 3))
def test_a_mean_of_no_higher_rank_comes_through(size, seed, rank):
    """Where the gradients of all ranks lie in r directions, nothing is left over but rounding.

    That is the larger the nearer the first directions, which are drawn, are to being orthogonal to those: above 0.01 in
    1 of the 1,500 draws that there are here, 0.074. A mean near zero, of ranks that cancel each other, is not tried.
    """
    left = torch.randn(30, rank, generator=torch.Generator().manual_seed(seed))

    def low_rank(shape, generator):
        return left @ (1 + torch.randn(rank, shape[1], generator=generator))

    options = {"algorithm": "powersgd", "options": {"rank": rank}, "shapes": {"a": (30, 40)}}
    results = SimulatedWorld(size).run(lambda comm: train(comm, steps=range(3), seed=seed, draw=low_rank, **options))
    inputs = sum(result[0] for result in results)
    for _, applied, rest, _ in results:
        assert (applied - inputs).norm() < 0.08 * inputs.norm()
        assert rest.norm() < 0.08 * inputs.norm()


def test_int8_alone_is_the_dense_sum():
    def run(name):
        return SimulatedWorld(1).run(lambda comm: train(comm, algorithm=name, steps=range(3)))[0]

    assert torch.equal(run("dense")[1], run("dense-int8")[1])
    assert not run("dense-int8")[2].any()


@pytest.mark.slow
def test_power_iteration_goes_on_from_step_to_step():
    """The same gradient again and again: what is sent of it in a step nears its best approximation of that rank."""
    matrix = torch.randn(30, 40, generator=torch.Generator().manual_seed(1))
    best = torch.linalg.svdvals(matrix)[:2].square().sum().sqrt()

    def body(comm):
        model, optimizer = make(comm, shapes={"a": (30, 40)}, algorithm="powersgd")
        norms = []
        for _ in range(60):
            optimizer.optimizer.state.clear()
            model["a"].grad = matrix.clone()
            kept = optimizer.state_dict()
            kept["distributed"]["residuals"] = {"a": torch.zeros(30, 40)}
            optimizer.load_state_dict(kept)
            optimizer.step()
            norms.append(float(model["a"].grad.norm()))
        return norms

    norms = SimulatedWorld(2).run(body)[0]
    assert norms[0] < 0.8 * best
    assert norms[-1] > 0.99 * best


def test_a_direction_whose_gradients_were_zero_begins_anew():
    def body(comm):
        model, optimizer = make(comm, algorithm="powersgd", shapes={"a": (30, 40)})
        for step in range(2):
            model["a"].grad = torch.full((30, 40), float(step))
            optimizer.step()
        return float(model["a"].detach().sum())

    assert SimulatedWorld(2).run(body) == pytest.approx([-1200.0] * 2, rel=1e-5)


def test_starts_are_drawn_once(monkeypatch):
    """When a bucket is met; a step needs one only for a direction that has died out, and has it at hand."""
    drawn = []
    draw = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *shape, **options: drawn.append(shape) or draw(*shape, **options))

    def body(comm):
        model, optimizer = make(comm, algorithm="powersgd")
        for step in range(3):
            for p in model.values():
                p.grad = torch.full(p.shape, float(step))  # at first zeros: directions die out, and begin anew
            optimizer.step()
        return float(model["matrix"].detach().sum())

    assert SimulatedWorld(1).run(body) == pytest.approx([-3.0 * 30 * 40], rel=1e-5)
    assert sorted(drawn) == [(27, 2), (40, 2)]  # of "filters" and of "matrix"


def test_the_global_generator_is_left_alone():
    torch.manual_seed(3)
    expected = torch.random.get_rng_state()
    SimulatedWorld(2).run(lambda comm: train(comm, algorithm="powersgd", steps=[0])[1])
    assert torch.equal(torch.random.get_rng_state(), expected)


@either
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_residuals_are_float32(name, dtype):
    def body(comm):
        model, optimizer = make(comm, dtype=dtype, algorithm=name, lr=0.01)
        for p in model.values():
            p.grad = torch.full(p.shape, 1.0 + comm.rank, dtype=dtype)
        optimizer.step()
        assert model["matrix"].grad.dtype == dtype
        return flat(p.grad.float() for p in model.values()), optimizer.state_dict()["distributed"]["residuals"]

    for mean, residuals in SimulatedWorld(2).run(body):
        torch.testing.assert_close(mean, torch.full_like(mean, 1.5), rtol=0.01, atol=0)
        assert {r.dtype for r in residuals.values()} == {torch.float32}


def test_float64():
    options = {"dtype": torch.float64, "steps": [0], "draw": lambda shape, g: torch.randn(shape, generator=g).double()}
    results = SimulatedWorld(3).run(lambda comm: train(comm, algorithm="powersgd", **options))
    inputs, rests = (sum(result[i] for result in results) for i in (0, 2))
    torch.testing.assert_close(inputs, results[0][1] + rests, rtol=0, atol=1e-6)  # gradients were drawn in float32
    with pytest.raises(TypeError, match="float64: take algorithm='dense'"):
        make(None, dtype=torch.float64, algorithm="dense-int8")


@pytest.mark.parametrize("size", [3, 6, 14])
def test_small_sums_of_powersgd_take_a_logarithm_of_rounds(size):
    """Also where P is no power of two: 2(P − 1) messages a sum would cost more than their few bytes."""
    log = size.bit_length() - 1
    for rank in range(size):
        sent = powersgd_sent(rank, size, [torch.Size(shape) for shape in SHAPES.values()], 2)
        assert sent.messages <= sent.rounds <= 2 * (2 * log + 2)


@either
@pytest.mark.parametrize("size", [1, 3, 4])
def test_residuals_outlive_another_number_of_ranks(name, size):
    """What is still to be applied, Σ residuals / P, stays the same."""
    before = SimulatedWorld(2).run(lambda comm: train(comm, algorithm=name, steps=range(3), draw=normal))
    states = reshard_residuals([result[3][1] for result in before], size)

    def body(comm):
        _, optimizer = make(comm, algorithm=name)
        optimizer.load_state_dict(states[comm.rank])
        kept = optimizer.state_dict()["distributed"]
        assert kept.get("directions") == before[0][3][1]["distributed"].get("directions")  # alike for any number
        return flat(kept["residuals"][key].double() for key in sorted(SHAPES))

    after = SimulatedWorld(size).run(body)
    torch.testing.assert_close(sum(after) / size, sum(result[2] for result in before) / 2, rtol=0, atol=1e-5)


def test_a_state_of_another_rank_is_refused():
    saved = SimulatedWorld(1).run(lambda comm: train(comm, algorithm="powersgd", steps=[0]))[0][3]
    options = {"algorithm": "powersgd", "options": {"rank": 1}, "steps": (), "saved": saved}
    with pytest.raises(ValueError, match="saved with rank=2, but this is powersgd with rank=1"):
        SimulatedWorld(1).run(lambda comm: train(comm, **options))


@pytest.mark.parametrize("make_one", [make, lambda comm, **settings: SparseHookState(**settings)])
@pytest.mark.parametrize(
    ("wrong", "error", "says"),
    [
        ({"algorithm": "powersgd", "momentum": 0.9}, ValueError, "powersgd selects nothing, so momentum=0.9 belongs"),
        (
            {"algorithm": "powersgd", "wire": "bf16"},
            ValueError,
            "powersgd has a wire of its own: leave out wire='bf16'",
        ),
        (
            {"algorithm": "powersgd", "options": {"teams": 2}},
            ValueError,
            "no option teams; it takes: rank, dense_steps",
        ),
        ({"algorithm": "powersgd", "options": {"rank": 0}}, ValueError, "rank is 0, expected 1 or more"),
        ({"algorithm": "powersgd", "options": {"rank": 1.5}}, TypeError, "rank is 1.5"),
        (
            {"algorithm": "powersgd", "options": {"dense_steps": -1}},
            ValueError,
            "dense_steps is -1, expected 0 or more",
        ),
        ({"algorithm": "dense-int8", "options": {"rank": 1}}, ValueError, "no option rank; it takes: none"),
    ],
)
def test_wrong_settings(make_one, wrong, error, says):
    with pytest.raises(error, match=says):
        make_one(None, **wrong)


@given(st.integers(1, 70), st.integers(1, 4), st.integers(0, 99))
def test_columns_are_orthonormal(length, columns, seed):
    matrix = torch.randn(length, columns, generator=torch.Generator().manual_seed(seed))
    dependent = torch.cat([matrix, matrix[:, :1]], 1)
    for found in orthonormal([matrix, dependent[:, :columns], torch.zeros(length, columns)])[:2]:
        count = min(length, columns)
        torch.testing.assert_close((found.T @ found)[:count, :count], torch.eye(count), rtol=0, atol=1e-5)
    basis = orthonormal([dependent])[0]
    torch.testing.assert_close(basis @ (basis.T @ matrix), matrix, rtol=0, atol=1e-4)
    torch.testing.assert_close(outer_sum(matrix, matrix), matrix @ matrix.T, rtol=0, atol=1e-4)


@pytest.mark.slow
@settings(max_examples=12)
@given(size=st.sampled_from(SIZES), seed=st.integers(0, 99), dense_steps=st.integers(0, 4))
def test_the_first_steps_of_powersgd_are_dense_ones(size, seed, dense_steps):
    """They leave no residuals, and what follows begins as it would have begun at first."""

    def run(steps, **options):
        options = {"steps": range(steps), "seed": seed, "draw": normal, **options}
        return SimulatedWorld(size).run(lambda comm: train(comm, **options))

    own = {"algorithm": "powersgd", "options": {"dense_steps": dense_steps}}
    for one, dense in zip(run(dense_steps, **own), run(dense_steps, algorithm="dense"), strict=True):
        assert not one[2].any()
        torch.testing.assert_close(one[1], dense[1], rtol=0, atol=1e-5 * size)
    assert run(dense_steps + 1, **own)[0][2].any()


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_dense_steps_send_what_their_expression_says(size):
    worlds = SimulatedWorld(size), SimulatedWorld(size), SimulatedWorld(size)
    for steps, world in enumerate(worlds):
        own = {"algorithm": "powersgd", "options": {"dense_steps": 1}, "steps": range(steps)}
        world.run(lambda comm, own=own: train(comm, **own))
    shapes = [torch.Size(shape) for shape in SHAPES.values()]
    for columns, before, after in ((None, *worlds[:2]), (2, *worlds[1:])):
        sent = [powersgd_sent(rank, size, shapes, columns) for rank in range(size)]
        assert [b - a for a, b in zip(before.bytes_sent, after.bytes_sent, strict=True)] == [t.nbytes for t in sent]


def test_elements_are_counted_in_time_that_grows_with_the_tensors():
    def seconds(many):
        shapes, begin = [torch.Size((8, 8))] * many, time.process_time()
        assert powersgd_elements(shapes, 2) == (16 * many, 16 * many)
        return time.process_time() - begin

    few, many = (min(seconds(n) for _ in range(3)) for n in (2_000, 64_000))
    assert many < 180 * few  # as many are 32 times, squares 1,024 times; cores are shared


def test_dense_steps_are_counted_on_through_another_number_of_ranks():
    own = {"algorithm": "powersgd", "options": {"dense_steps": 3}, "draw": normal}
    before = SimulatedWorld(2).run(lambda comm: train(comm, steps=range(2), **own))
    states = reshard_residuals([result[3][1] for result in before], 3)

    def body(comm):
        saved = before[0][3][0], states[comm.rank]
        return [bool(train(comm, steps=range(2, end), saved=saved, **own)[2].any()) for end in (3, 4)]

    assert SimulatedWorld(3).run(body) == [[False, True]] * 3


def test_a_rank_that_takes_a_dense_step_alone_is_told():
    own = {"algorithm": "powersgd", "options": {"dense_steps": 2}}

    def body(comm):
        model, state = train(comm, steps=[0], **own)[3]
        state["distributed"]["stood"] += comm.rank
        with pytest.raises(CollectiveError, match=r"ranks disagree.*powersgd\(rank=None.*powersgd\(rank=2"):
            train(comm, steps=[1], saved=(model, state), **own)

    SimulatedWorld(2).run(body)


def test_residuals_of_another_algorithm_are_applied_in_the_first_dense_step():
    saved = SimulatedWorld(2).run(lambda comm: train(comm, algorithm="dense-int8", steps=range(2), draw=normal))
    own = {"algorithm": "powersgd", "options": {"dense_steps": 1}, "draw": normal}
    after = SimulatedWorld(2).run(lambda comm: train(comm, steps=[2], saved=saved[comm.rank][3], **own))
    whole = sum(result[0] for result in saved) + sum(result[0] for result in after)
    torch.testing.assert_close(after[0][1], whole, rtol=0, atol=1e-4)
    assert not any(result[2].any() for result in after)
