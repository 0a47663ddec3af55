"""UpdateOptimizer: what the wrapped optimizer would do with a rank's own gradients is exchanged."""

import copy

import pytest
import torch
from communicators import CollectiveError, SimulatedWorld
from data_parallel import DistributedOptimizer, UpdateOptimizer, reshard_residuals
from hypothesis import given
from hypothesis import strategies as st
from sparse_collectives import ALGORITHMS, ARCTopK
from sparse_compress import WarmUp
from torch import nn

pytestmark = pytest.mark.quick

SHAPES = {"a": (3, 4), "b": (5,), "c": (1,), "d": (2, 3)}
OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, weight_decay=0.1),
}
SPARSE = [*(name for name, entry in ALGORITHMS.items() if entry.selects), ARCTopK(width=2)]


def made(comm, *, optimizer="adamw", zeros=False, **options):
    torch.manual_seed(comm.rank)
    start = torch.zeros if zeros else torch.randn
    model = nn.ParameterDict({name: nn.Parameter(start(shape)) for name, shape in SHAPES.items()})
    inner = OPTIMIZERS[optimizer](model.parameters()) if isinstance(optimizer, str) else optimizer(model.parameters())
    return model, UpdateOptimizer(inner, model.named_parameters(), comm=comm, **options)


def give(model, comm, step):
    """Gradients that depend on the parameters."""
    generator = torch.Generator().manual_seed(1000 * step + comm.rank)
    for p in model.values():
        p.grad = torch.randn(p.shape, generator=generator) + p.detach()


def flat(tensors):
    return torch.cat([tensors[name].detach().reshape(-1) for name in SHAPES])


@pytest.mark.few(2)
@pytest.mark.parametrize("name", SPARSE, ids=lambda given: getattr(given, "name", given))
@given(
    size=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 99),
    steps=st.integers(1, 5),
    density=st.sampled_from([0.01, 0.2, 1.0, WarmUp(0.05, 3), lambda step: 1.0 if step % 2 else 0.1]),
    bucket_bytes=st.sampled_from([None, 1, 24]),
    missing=st.sets(st.tuples(st.integers(0, 3), st.sampled_from(list(SHAPES)))),
)
def test_nothing_of_an_update_is_lost(name, size, seed, steps, density, bucket_bytes, missing):
    """With integer gradients and SGD at lr 1: Σ gradients = −P · parameters + Σ residuals, exactly."""

    def body(comm):
        def plain(parameters):
            return torch.optim.SGD(parameters, lr=1.0)

        options = {"algorithm": name, "density": density, "bucket_bytes": bucket_bytes}
        model, optimizer = made(comm, optimizer=plain, zeros=True, **options)
        generator, given = torch.Generator().manual_seed(10 * seed + comm.rank), torch.zeros(24)
        for _ in range(steps):
            for key, p in model.items():
                gradient = torch.randint(-9, 10, p.shape, generator=generator).float()
                p.grad = None if (comm.rank, key) in missing else gradient
            given += flat({key: torch.zeros_like(p) if p.grad is None else p.grad for key, p in model.items()})
            with optimizer.ahead():
                inside = flat(model)
            waits = flat(optimizer.state_dict()["distributed"]["residuals"])
            assert torch.equal(inside, flat(model) + waits)
            optimizer.step()
        return given, flat(model), flat(optimizer.state_dict()["distributed"]["residuals"])

    results = SimulatedWorld(size).run(body)
    total = -sum(given for given, _, _ in results)  # updates go against gradients
    for _, parameters, _ in results:
        assert torch.equal(total, size * parameters + sum(residual for _, _, residual in results))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_one_rank_at_density_1_is_the_wrapped_optimizer_within_rounding(optimizer):
    def body(comm):
        model, wrapper = made(comm, optimizer=optimizer, density=1.0)
        plain = copy.deepcopy(model)
        alone = OPTIMIZERS[optimizer](plain.parameters())
        for step in range(5):
            with wrapper.ahead():
                give(model, comm, step)
            give(plain, comm, step)
            wrapper.step()
            alone.step()
        return flat(model), flat(plain)

    torch.testing.assert_close(*SimulatedWorld(1).run(body)[0], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_ranks_stay_alike_and_moments_are_their_own(optimizer, size):
    def body(comm):
        model, wrapper = made(comm, optimizer=optimizer, density=0.1)
        for step in range(4):
            with wrapper.ahead():
                give(model, comm, step)
            wrapper.step()
        moments = [value for kept in wrapper.optimizer.state_dict()["state"].values() for value in kept.values()]
        return flat(model), torch.cat([m.reshape(-1) for m in moments if torch.is_tensor(m)])

    results = SimulatedWorld(size).run(body)
    assert all(torch.equal(parameters, results[0][0]) for parameters, _ in results)
    assert not torch.equal(results[0][1], results[1][1])


def train(comm, steps, saved=None, **options):
    model, optimizer = made(comm, **options)
    if saved is not None:
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
    for step in steps:
        with optimizer.ahead():
            give(model, comm, step)
        optimizer.step()
    return copy.deepcopy((model.state_dict(), optimizer.state_dict()))


@pytest.mark.parametrize("density", [0.1, WarmUp(0.05, steps=6)])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_resumed_runs_end_in_the_same_bits(optimizer, density):
    options = {"optimizer": optimizer, "density": density, "clip_norm": 1.0}
    world = SimulatedWorld(3)
    whole = world.run(lambda comm: train(comm, range(8), **options))
    half = world.run(lambda comm: train(comm, range(4), **options))
    rest = world.run(lambda comm: train(comm, range(4, 8), half[comm.rank], **options))
    for one, other in zip(whole, rest, strict=True):
        assert torch.equal(flat(one[0]), flat(other[0]))
        assert torch.equal(flat(one[1]["distributed"]["residuals"]), flat(other[1]["distributed"]["residuals"]))
        assert one[1]["distributed"]["steps"] == other[1]["distributed"]["steps"] == 8


@pytest.mark.parametrize("size", [1, 3, 5])
def test_another_number_of_ranks_has_the_mean_of_the_moments_and_the_same_to_apply(size):
    saved = SimulatedWorld(2).run(lambda comm: train(comm, range(4), density=0.1))
    states = reshard_residuals([state for _, state in saved], size)
    before = sum(flat(state["distributed"]["residuals"]) for _, state in saved) / 2
    after = sum(flat(state["distributed"]["residuals"]) for state in states) / size
    torch.testing.assert_close(before, after)
    mean = sum(state["state"][0]["exp_avg"] for _, state in saved) / 2
    assert all(torch.equal(state["state"][0]["exp_avg"], mean) for state in states)
    SimulatedWorld(size).run(lambda comm: train(comm, range(2), (saved[0][0], states[comm.rank]), density=0.1))


@pytest.mark.filterwarnings("ignore:ASGD averages parameters")
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.NAdam, torch.optim.ASGD])
def test_moments_of_a_parameter_that_is_a_number_are_means_and_counters_stay_counters(kind):
    """As of a temperature that is learnt, nn.Parameter(torch.tensor(1.0))."""

    def body(comm):
        model = nn.ParameterDict({"scale": nn.Parameter(torch.tensor(1.0)), "w": nn.Parameter(torch.ones(3))})
        optimizer = UpdateOptimizer(kind(model.parameters(), lr=0.01), model.named_parameters(), comm=comm, density=1.0)
        for step in range(2):
            with optimizer.ahead():
                for p in model.values():
                    p.grad = torch.full_like(p, 1.0 + comm.rank + step)
            optimizer.step()
        return optimizer.state_dict()

    first, second = SimulatedWorld(2).run(body)
    for resharded in reshard_residuals([first, second], 3):
        for number, kept in resharded["state"].items():
            assert kept["step"] == 2
            for name, value in kept.items():
                assert torch.equal(value, (first["state"][number][name] + second["state"][number][name]) / 2), name


def test_moments_that_only_some_ranks_have_are_the_mean_over_these():
    """And what a state foresees for a parameter without a gradient so far counts for nothing."""

    def body(comm, state=None):
        model, optimizer = made(comm, density=1.0)
        if state is not None:
            optimizer.load_state_dict(state)
            return optimizer.optimizer.state_dict()["state"]
        with optimizer.ahead():
            give(model, comm, 0)
            model["a"].grad = None
            model["b"].grad = None if comm.rank == 0 else torch.full((5,), float(comm.rank))
        optimizer.step()
        return optimizer.state_dict()

    states = SimulatedWorld(3).run(body)
    resharded = reshard_residuals(states, 2)
    for kept in SimulatedWorld(2).run(lambda comm: body(comm, resharded[comm.rank])):
        assert sorted(kept) == [1, 2, 3]
        assert torch.equal(
            kept[1]["exp_avg"], (states[1]["state"][1]["exp_avg"] + states[2]["state"][1]["exp_avg"]) / 2
        )


def test_residuals_of_gradients_are_not_taken_for_updates():
    def body(comm):
        _, state = train(comm, range(2), density=0.1)
        model, _ = made(comm)
        other = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), comm=comm)
        with pytest.raises(ValueError, match="are of updates, and not of gradients: load it into an UpdateOptimizer"):
            other.load_state_dict(state)
        with pytest.raises(
            ValueError, match="are of gradients, and not of updates: load it into a DistributedOptimizer"
        ):
            made(comm)[1].load_state_dict(other.state_dict())

    SimulatedWorld(2).run(body)


class Signs(torch.optim.SGD):
    """Makes what is finite of an inf."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data.sub_(p.grad.sign(), alpha=group["lr"])


@pytest.mark.parametrize("optimizer", ["adamw", Signs])
def test_a_gradient_that_is_not_finite_is_named_and_no_parameter_changes(optimizer):
    def body(comm):
        model, optimizer_ = made(comm, optimizer=optimizer)
        before = flat(model)
        with optimizer_.ahead():
            give(model, comm, 0)
        if comm.rank == 1:
            model["b"].grad[0] = torch.inf
        with pytest.raises(CollectiveError, match="rank 1: the update of 'b' is not finite"):
            optimizer_.step()
        assert torch.equal(flat(model), before)

    SimulatedWorld(2).run(body)


def test_a_skipped_step_leaves_no_trace():
    def body(comm, bad):
        model, optimizer = made(comm, nonfinite="skip", density=0.1)
        for step in range(4):
            with optimizer.ahead():
                give(model, comm, step)
            if step == 2:
                if not bad:
                    continue
                if comm.rank == 1:
                    model["d"].grad[0] = torch.nan
            optimizer.step()
        assert optimizer.skipped == bad
        state = copy.deepcopy(optimizer.state_dict())
        return flat(model), flat(state["distributed"]["residuals"]), state["state"][0]["exp_avg_sq"]

    world = SimulatedWorld(3)
    for one, other in zip(
        world.run(lambda comm: body(comm, True)), world.run(lambda comm: body(comm, False)), strict=True
    ):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_density_by_step_is_followed_from_step_to_step():
    """Counted by the parameters that each step moves."""

    def body(comm):
        def plain(parameters):
            return torch.optim.SGD(parameters, lr=1.0)

        model, optimizer = made(comm, optimizer=plain, zeros=True, density=WarmUp(1 / 24, steps=2, stages=(1.0, 0.25)))
        moved = []
        for step in range(4):
            before = flat(model).clone()
            torch.manual_seed(step)  # alike on all ranks, so that all select alike
            with optimizer.ahead():
                for p in model.values():
                    p.grad = torch.rand_like(p) + 1
            optimizer.step()
            moved.append(int((flat(model) != before).sum()))
        return moved

    assert SimulatedWorld(2).run(body) == [[24, 6, 1, 1]] * 2


def test_schedulers_scale_what_is_sent_from_then_on():
    def body(comm):
        def plain(parameters):
            return torch.optim.SGD(parameters, lr=1.0)

        model, optimizer = made(comm, optimizer=plain, zeros=True, density=1.0)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        for _ in range(3):
            for p in model.values():
                p.grad = torch.ones_like(p)
            optimizer.step()
            schedule.step()
        return flat(model)

    assert all(torch.equal(result, torch.full((24,), -1.75)) for result in SimulatedWorld(2).run(body))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"momentum": 0.9}, "belongs into the wrapped optimizer"),
        ({"algorithm": "dense"}, "for algorithms that select"),
        ({"algorithm": "powersgd"}, "for algorithms that select"),
    ],
)
def test_settings_that_do_not_fit(options, says):
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=says):
        UpdateOptimizer(torch.optim.AdamW(model.parameters()), model.named_parameters(), **options)


class OnItsClosure(torch.optim.SGD):
    def step(self, closure):
        loss = closure()
        super().step()
        return loss


@pytest.mark.parametrize("kind", [DistributedOptimizer, UpdateOptimizer])
@pytest.mark.parametrize("wrapped", [False, True])
def test_an_optimizer_that_cannot_step_without_its_closure_is_refused(wrapped, kind):
    """Whatever a scheduler has put round its step."""
    model = nn.Linear(2, 2)
    optimizer = OnItsClosure(model.parameters(), lr=0.1)
    if wrapped:
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(
        TypeError, match=r"OnItsClosure.step\(\) needs closure, and .* give OnItsClosure a step\(closure="
    ):
        kind(optimizer, model.named_parameters())


def test_averages_of_a_ranks_own_parameters_are_told_of():
    def body(comm):
        made(comm, optimizer=torch.optim.ASGD)

    SimulatedWorld(1).run(body)
    with pytest.warns(UserWarning, match="ASGD averages parameters, .* take a DistributedOptimizer"):
        SimulatedWorld(2).run(body)


@pytest.mark.parametrize(
    ("momentum", "says"), [(0.0, "Wrap it in an UpdateOptimizer"), (0.9, "learns worse than with either alone")]
)
def test_adam_behind_a_sparse_exchange_is_warned_about(momentum, says):
    model = nn.Linear(2, 2)
    with pytest.warns(UserWarning, match=says):
        DistributedOptimizer(torch.optim.Adam(model.parameters()), model.named_parameters(), momentum=momentum)


def test_adam_with_dense_gradients_or_updates_is_not():
    model = nn.Linear(2, 2)
    DistributedOptimizer(torch.optim.Adam(model.parameters()), model.named_parameters(), algorithm="dense")
    UpdateOptimizer(torch.optim.Adam(model.parameters()), model.named_parameters())
