"""`UpdateOptimizer.for_model`: the recommended settings, and a training loop that stays as it is."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import io
import pickle
import warnings

import pytest
import torch
from communicators import SimulatedWorld
from data_parallel import DistributedOptimizer, UpdateOptimizer
from hypothesis import given
from hypothesis import strategies as st
from sparse_compress import TopK, WarmUp
from torch import nn
from torch.nn.utils import prune

pytestmark = pytest.mark.quick

INNER = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}
STEPS = 12


def model_of():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 50), nn.Dropout(0.0), nn.ReLU(), nn.Linear(50, 3))


def batch(rank, step):
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def bits(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def by_hand(comm, inner, accumulate=1, **settings):
    """The lines of before."""
    model = model_of()
    made = INNER[inner](model.parameters())
    if inner == "adamw":
        made.param_groups[0]["betas"] = (0.5, 0.999)
    density = WarmUp(0.05, STEPS // 10, stages=(1.0,))
    given = {"density": density, "dense_below": 256, **settings}
    optimizer = UpdateOptimizer(made, model.named_parameters(), comm=comm, **given)
    for step in range(STEPS):
        optimizer.zero_grad()
        with optimizer.ahead():
            for part in range(accumulate):
                model(batch(comm.rank, step + part)).square().mean().backward()
        optimizer.step()
    return bits(model.parameters())


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("accumulate", [1, 3])
@given(size=st.sampled_from([1, 2, 3, 5]), evaluates=st.booleans())
def test_it_is_the_lines_that_were_written_by_hand(inner, accumulate, size, evaluates):
    """Bit for bit, whatever is looked at between the steps; a look between backward and step does not harm either."""

    def body(comm):
        model = model_of()
        optimizer = UpdateOptimizer.for_model(
            INNER[inner](model.parameters()), model, steps=STEPS, density=0.05, comm=comm
        )
        for step in range(STEPS):
            optimizer.zero_grad()
            for part in range(accumulate):
                model(batch(comm.rank, step + part)).square().mean().backward()
            if evaluates and step % 2:
                model.eval()
                model(batch(0, 0))
                model.train()
            optimizer.step()
            if evaluates:
                with torch.no_grad():
                    model(batch(1, 1))
                model.state_dict()
        return bits(model.parameters())

    ours, theirs = (
        SimulatedWorld(size).run(body),
        SimulatedWorld(size).run(lambda comm: by_hand(comm, inner, accumulate)),
    )
    for own, hand in zip(ours, theirs, strict=True):
        assert torch.equal(own, hand)
        assert torch.equal(own, ours[0])


@pytest.mark.parametrize(
    "look",
    [
        lambda model: bits(model.state_dict().values()),
        lambda model: (model.eval(), model(torch.zeros(1, 6)), bits(model.parameters()))[-1],
        lambda model: no_grad(model),
        lambda model: (model.load_state_dict(copy.deepcopy(model.state_dict())), bits(model.parameters()))[-1],
    ],
    ids=["state_dict", "eval", "no_grad", "load_state_dict"],
)
def test_between_forward_and_step_a_look_sees_what_all_ranks_have(look):
    def body(comm):
        model = model_of()
        inner = INNER["adamw"](model.parameters())
        optimizer = UpdateOptimizer.for_model(inner, model, density=lambda step: 0.05, comm=comm)
        for step in range(3):
            model(batch(comm.rank, step)).square().mean().backward()
            optimizer.step()
        shared = bits(model.parameters())
        model(batch(comm.rank, 9)).square().mean().backward()
        inside = bits(model.parameters())
        assert optimizer.is_ahead
        seen = look(model)
        assert not optimizer.is_ahead
        assert torch.equal(seen, shared)
        assert not torch.equal(inside, shared)
        model.train()
        optimizer.step()
        return bits(model.parameters())

    first, second = SimulatedWorld(2).run(body)
    assert torch.equal(first, second)


def no_grad(model):
    with torch.no_grad():
        model(torch.zeros(1, 6))
    return bits(model.parameters())


def test_the_optimizers_own_state_and_closures_leave_too():
    model = model_of()
    optimizer = UpdateOptimizer.for_model(INNER["adamw"](model.parameters()), model)

    def loss():
        optimizer.zero_grad()
        found = model(batch(0, 0)).square().mean()
        found.backward()
        return found

    model(batch(0, 0)).square().mean().backward()
    assert optimizer.is_ahead
    optimizer.state_dict()
    assert not optimizer.is_ahead
    model(batch(0, 0)).square().mean().backward()
    assert optimizer.step(loss) > 0
    assert not optimizer.is_ahead
    with optimizer.ahead():
        loss()
    optimizer.step()


def test_the_recommended_settings_and_ones_own():
    def made(**settings):
        model = model_of()
        inner = torch.optim.AdamW(model.parameters(), betas=settings.pop("betas", (0.9, 0.99)))
        return UpdateOptimizer.for_model(inner, model, **settings)

    optimizer = made(steps=2000)
    assert optimizer.param_groups[0]["betas"] == (0.5, 0.99)
    assert schedule(optimizer) == WarmUp(0.01, 200, stages=(1.0,))
    assert schedule(made()) == WarmUp(0.01, 100, stages=(1.0,))
    assert schedule(made(steps=2000, density=0.001)) == WarmUp(0.001, 400)
    assert "dense_below=256" in repr(optimizer)
    assert f"density={WarmUp(0.01, 200, stages=(1.0,))}" in repr(optimizer)
    assert "dense_below=256" not in repr(made(dense_below=0))
    assert made(beta1=None).param_groups[0]["betas"] == (0.9, 0.99)
    assert made(beta1=0.7).param_groups[0]["betas"] == (0.7, 0.99)
    assert made(betas=(0.8, 0.99)).param_groups[0]["betas"] == (0.8, 0.99)
    assert repr(made(algorithm="spardl")).count("spardl") == 1
    with pytest.raises(TypeError):
        made(steps="many")


def test_a_compressors_own_density_is_kept():
    model = model_of()
    optimizer = UpdateOptimizer.for_model(INNER["sgd"](model.parameters()), model, steps=50, compressor=TopK(0.2))
    assert schedule(optimizer) == WarmUp.recommended(0.2, 50)


def test_another_optimizer_of_the_same_model_takes_over():
    """The first one's hooks, of which a scheduler keeps it alive, entered an ahead() that nobody left."""
    model, losses = model_of(), []
    first = UpdateOptimizer.for_model(INNER["sgd"](model.parameters()), model, density=lambda step: 0.05)
    model(batch(0, 0)).square().mean().backward()
    assert first.is_ahead
    second = UpdateOptimizer.for_model(INNER["sgd"](model.parameters()), model, density=lambda step: 0.05)
    assert not first.is_ahead
    for step in range(3):
        second.zero_grad()
        model(batch(0, step)).square().mean().backward()
        assert second.is_ahead
        assert not first.is_ahead
        second.step()
        losses.append(bits(model.parameters()))
    model.eval()
    model(batch(0, 0))
    assert torch.equal(bits(model.parameters()), losses[-1])


@pytest.mark.parametrize("loads", [True, False])
def test_a_beta1_that_was_set_again_is_told_of(loads):
    model = model_of()
    inner, dense = (INNER["adamw"](model.parameters()) for _ in range(2))
    optimizer = UpdateOptimizer.for_model(inner, model)
    if loads:
        inner.load_state_dict(dense.state_dict())
    else:
        torch.optim.lr_scheduler.OneCycleLR(inner, max_lr=0.1, total_steps=10)
    model(batch(0, 0)).square().mean().backward()
    with pytest.warns(UserWarning, match=r"Adam's β₁ is 0.9.*where for_model had set 0.5"):
        optimizer.step()
    model(batch(0, 1)).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("made_first", [True, False])
def test_one_cycle_that_was_there_first_cycles_the_beta1_of_what_waits(made_first):
    model = model_of()
    inner = INNER["adamw"](model.parameters())
    settings = {} if made_first else {"cycle_momentum": False}
    scheduler = torch.optim.lr_scheduler.OneCycleLR(inner, max_lr=0.01, total_steps=10, **settings)
    optimizer = UpdateOptimizer.for_model(inner, model)
    for step in range(9):
        model(batch(0, step)).square().mean().backward()
        optimizer.step()
        assert inner.param_groups[0]["betas"] == (0.5, 0.999)
        scheduler.step()


def test_a_beta1_of_ones_own_is_not_told_of():
    model = model_of()
    parameters = zip(model.parameters(), (0.9, 0.95, 0.9, 0.5), strict=True)
    groups = [{"params": [p], "betas": (beta1, 0.999)} for p, beta1 in parameters]
    for settings in ({}, {"beta1": 0.9}, {"beta1": None}):
        optimizer = UpdateOptimizer.for_model(torch.optim.AdamW(groups), model, **settings)
        model(batch(0, 0)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        ({"wire": "nonsense"}, ValueError, "wire"),
        ({"algorithm": "dense-int8"}, ValueError, "'dense-int8' selects nothing.*take a DistributedOptimizer"),
        ({"algorithm": "dense", "density": 0.1}, ValueError, "'dense' selects nothing"),
        ({"momentum": 0.9}, ValueError, "belongs into the wrapped optimizer"),
        ({"nonfinite": "leave"}, ValueError, "nonfinite"),
        ({"comm": 3}, TypeError, "expected an mpi4py communicator"),
        ({"beta1": 1.0}, ValueError, "beta1 is 1.0, expected a number from 0 on and below 1, or None"),
        ({"beta1": "0.5"}, ValueError, "beta1 is .0.5., expected"),
    ],
)
def test_settings_that_are_refused_leave_both_optimizers_as_they_were(settings, error, said):
    model = model_of()
    first = UpdateOptimizer.for_model(INNER["adamw"](model.parameters()), model)
    model(batch(0, 0)).square().mean().backward()
    other = INNER["adamw"](model.parameters())
    with pytest.raises(error, match=said):
        UpdateOptimizer.for_model(other, model, **settings)
    assert other.param_groups[0]["betas"][0] == 0.9
    first.step()
    model(batch(0, 0)).square().mean().backward()
    assert first.is_ahead
    first.step()


def test_autocast_forgets_what_it_cast_ahead():
    """Within one region an evaluation took the weights of ahead(), which are this rank's own."""
    model = model_of()
    optimizer = UpdateOptimizer.for_model(INNER["sgd"](model.parameters()), model, density=lambda step: 0.05)
    for step in range(3):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(batch(0, step)).square().mean().backward()
            with torch.no_grad():
                within = model(batch(0, 9))
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
            assert torch.equal(within, model(batch(0, 9)))
        optimizer.step()


def test_what_does_not_step_all_parameters_is_refused():
    zero = type("ZeroRedundancyOptimizer", (torch.optim.SGD,), {})
    model = model_of()
    with pytest.raises(TypeError, match="takes steps of a share of the parameters"):
        UpdateOptimizer.for_model(zero(model.parameters()), model)


def test_a_sparse_gradient_is_named():
    model = nn.Embedding(4, 2, sparse=True)
    optimizer = UpdateOptimizer.for_model(torch.optim.SGD(model.parameters()), model)
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match="the gradient of 'weight' has layout"):
        optimizer.step()


def schedule(optimizer):
    return optimizer._exchange.settings.density


@pytest.mark.slow
def test_the_optimizer_is_not_kept_by_its_module_and_copies_are_their_own():
    model = model_of()
    optimizer = UpdateOptimizer.for_model(INNER["adamw"](model.parameters()), model, density=lambda step: 0.05)
    twin, again = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    torch.save(model, io.BytesIO())
    for other in (twin, again):
        other(batch(0, 0)).square().mean().backward()
        assert not optimizer.is_ahead
    hooks = model._forward_pre_hooks, model._state_dict_pre_hooks, model._load_state_dict_pre_hooks
    assert all(hooks)
    gc.disable()  # what comes next, such as a dense training to compare with, meets nothing of it
    try:
        del optimizer
        assert not any(hooks)
    finally:
        gc.enable()
    model(batch(0, 0))


def test_a_forward_past_the_model_is_told_of():
    def body(comm):
        model = model_of()
        inner = INNER["adamw"](model.parameters())
        optimizer = UpdateOptimizer.for_model(inner, model, density=0.05, steps=10, comm=comm)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for step in range(2):
                model[3](model[0](batch(comm.rank, step))).square().mean().backward()
                optimizer.step()
        return [str(one.message) for one in told]

    assert any("without what waits in the residuals" in said for said in SimulatedWorld(2).run(body)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("way", ["no_grad", "data", "halved", "negated"])
def test_a_parameter_that_is_written_to_between_forward_and_step_is_an_error(way, dtype):
    model = model_of().to(dtype)
    with torch.no_grad():
        model[3].bias[0] = torch.nan  # is not equal to itself
    optimizer = UpdateOptimizer.for_model(INNER["adamw"](model.parameters()), model)
    for _ in range(2):
        model(batch(0, 0).to(dtype))[:, 1:].square().mean().backward()
        with torch.no_grad():
            written = model[0].weight if way == "no_grad" else model[0].weight.data
            if way in ("halved", "negated"):
                written.mul_(0.5 if way == "halved" else -1)
            else:
                written[0, 0] += 0.25
        with pytest.raises(RuntimeError, match=r"'0.weight' was written to inside ahead\(\)"):
            optimizer.step()


def later(model, kind, comm=None):
    """Optimizer of the second phase of a training."""
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    if kind == "torch":
        return inner
    if kind == "DistributedOptimizer":
        return DistributedOptimizer(inner, model.named_parameters(), density=0.1, comm=comm)
    return UpdateOptimizer.for_model(inner, model, density=0.1, steps=20, comm=comm)


@pytest.mark.parametrize("kind", ["DistributedOptimizer", "UpdateOptimizer"])
def test_a_later_wrapper_of_the_same_parameters_ends_what_an_earlier_one_does_to_them(kind):
    def body(comm, kept, amid):
        model = model_of()
        first = UpdateOptimizer.for_model(INNER["adamw"](model.parameters()), model, density=0.1, steps=20, comm=comm)
        for step in range(6):
            model(batch(comm.rank, step)).square().mean().backward()
            first.step()
            first.zero_grad()
        if amid:
            model(batch(comm.rank, 6)).sum().backward()
            first.zero_grad()
        scheduler = torch.optim.lr_scheduler.ConstantLR(first) if kept else None
        second = later(model, kind, comm)
        del first
        for step in range(6):
            model(batch(comm.rank, step)).square().mean().backward()
            second.step()
            second.zero_grad()
        del scheduler
        return bits(model.parameters())

    [alone, *others] = [
        found
        for kept, amid in ((False, False), (True, False), (True, True))
        for found in SimulatedWorld(2).run(lambda comm, kept=kept, amid=amid: body(comm, kept, amid))
    ]
    assert all(torch.equal(alone, other) for other in others)


def test_an_optimizer_of_torch_s_own_that_takes_over_is_told_of_in_its_first_step():
    def body(comm, unfollows):
        model = model_of()
        first = UpdateOptimizer.for_model(INNER["adamw"](model.parameters()), model, density=0.1, steps=20, comm=comm)
        for step in range(6):
            model(batch(comm.rank, step)).square().mean().backward()
            first.step()
        if unfollows:
            first.unfollow()
        second = later(model, "torch")
        before = bits(model.parameters())
        for _ in range(2 if unfollows else 1):
            second.zero_grad()
            model(batch(0, 0)).square().mean().backward()
            second.step()
        assert not first.is_ahead
        return before, bits(model.parameters())

    with pytest.raises(RuntimeError, match=r"was written to .* call the UpdateOptimizer's unfollow\(\)"):
        SimulatedWorld(2).run(lambda comm: body(comm, False))
    for before, after in SimulatedWorld(2).run(lambda comm: body(comm, True)):
        model, start = model_of(), 0
        for p in model.parameters():
            p.data.copy_(before[start : start + p.numel()].view_as(p))
            start += p.numel()
        second = later(model, "torch")
        for _ in range(2):
            second.zero_grad()
            model(batch(0, 0)).square().mean().backward()
            second.step()
        assert torch.equal(bits(model.parameters()), after)


def test_what_is_undone_because_the_optimizer_is_gone_is_told_of():
    model = model_of()
    optimizer = UpdateOptimizer.for_model(INNER["adamw"](model.parameters()), model)
    model(batch(0, 0)).square().mean().backward()
    with torch.no_grad():
        model[0].weight.add_(1)
    with pytest.warns(UserWarning, match=r"'0.weight' was written to inside ahead\(\)"):
        del optimizer


@pytest.mark.slow
@pytest.mark.parametrize("given", ["model", "compiled", "compiled fully"])
def test_a_compiled_model(given):
    def losses(compiles):
        torch._dynamo.reset()  # else it takes what it compiled of other models, without regard to their hooks
        model = model_of()
        called = torch.compile(model, backend="eager", fullgraph="fully" in given) if compiles else model
        followed = model if given == "model" else called
        optimizer = UpdateOptimizer.for_model(INNER["sgd"](model.parameters()), followed, density=sparse_at_once)
        found = []
        for step in range(4):
            optimizer.zero_grad()
            loss = called(batch(0, step)).square().mean()
            loss.backward()
            assert optimizer.is_ahead
            optimizer.step()
            found.append(loss.item())
        return found

    assert losses(True) == pytest.approx(losses(False))


def test_what_is_no_module_is_refused():
    model = model_of()
    adamw = INNER["adamw"](model.parameters())
    for swapped, kind in ((adamw, model.named_parameters()), "generator"), ((model, adamw), "AdamW"):
        with pytest.raises(TypeError, match=rf"model is {kind}, expected the torch\.nn\.Module itself"):
            UpdateOptimizer.for_model(*swapped)


def sparse_at_once(step):
    return 0.05


def losses_of(comm, model, called, inputs, **settings):
    """Trains `called`, which is the model or has it inside; gives its parameters."""
    sgd = INNER["sgd"](model.parameters())
    optimizer = UpdateOptimizer.for_model(sgd, called, comm=comm, density=sparse_at_once, dense_below=0, **settings)
    for x in inputs:
        optimizer.zero_grad()
        called(x[comm.rank :: comm.size]).square().mean().backward()
        optimizer.step()
    return bits(model.parameters())


@pytest.mark.parametrize("size", [1, 2])
def test_a_weight_that_a_hook_makes_before_the_forward_is_made_ahead(size):
    """As of pruning, and of torch's former weight_norm, which is followed in the layer itself."""
    inputs = torch.randn(8, 16, 20, generator=torch.Generator().manual_seed(3))

    def train(comm, whole):
        torch.manual_seed(0)
        layer = prune.random_unstructured(nn.Linear(20, 50), "weight", 0.3)
        return losses_of(comm, layer, layer if whole else nn.Sequential(layer), inputs)

    whole, inside = (SimulatedWorld(size).run(functools.partial(train, whole=whole)) for whole in (True, False))
    assert all(map(torch.equal, whole, inside))


@pytest.mark.slow
def test_the_original_of_a_compiled_model_is_evaluated_and_saved_as_all_ranks_have_it():
    def train(comm, looks):
        model = model_of()
        compiled = torch.compile(model, backend="eager")
        adam = INNER["adamw"](model.parameters())
        optimizer = UpdateOptimizer.for_model(adam, compiled, comm=comm, density=sparse_at_once, dense_below=0)
        for step in range(3):
            compiled(batch(comm.rank, step)).square().mean().backward()
            if step < 2:
                optimizer.step()
        ahead = optimizer.is_ahead
        seen = looks(model)
        assert (ahead, optimizer.is_ahead) == (True, False)
        return seen

    def evaluated(model):
        return model.eval()(batch(0, 0)).detach()

    for looks in (
        evaluated,
        lambda m: m.state_dict()["0.weight"].clone(),
        lambda m: m[0].state_dict()["weight"].clone(),
    ):
        mine, other = SimulatedWorld(2).run(functools.partial(train, looks=looks))
        assert torch.equal(mine, other)


@pytest.mark.slow
def test_a_compiled_step_is_the_step():
    def train(compiles):
        model = model_of()
        optimizer = UpdateOptimizer.for_model(INNER["adamw"](model.parameters()), model, steps=4, density=0.05)
        step = torch.compile(lambda: optimizer.step(), backend="eager") if compiles else optimizer.step
        for at in range(4):
            optimizer.zero_grad()
            model(batch(0, at)).square().mean().backward()
            step()
        return bits(model.parameters())

    assert torch.equal(train(True), train(False))


def test_a_reference_may_be_computed_between_forward_and_backward():
    """As in distillation from the model itself; before the forward it is of the parameters that all ranks have."""

    def train(comm, by_hand):
        model = model_of()
        sgd = INNER["sgd"](model.parameters())
        given = {"comm": comm, "density": sparse_at_once, "dense_below": 256}
        if by_hand:
            optimizer = UpdateOptimizer(sgd, model.named_parameters(), **given)
        else:
            optimizer = UpdateOptimizer.for_model(sgd, model, **given)
        for step in range(4):
            optimizer.zero_grad()
            with optimizer.ahead() if by_hand else contextlib.nullcontext():
                for part in range(2):  # accumulates
                    outputs = model(batch(comm.rank, step + part))
                    with torch.no_grad():
                        reference = model(batch(comm.rank, 7))
                    (outputs - reference).square().mean().backward()
            if not by_hand:
                assert optimizer.is_ahead
                with torch.no_grad():
                    model(batch(comm.rank, 7))  # nothing waits for its backward: this is an evaluation
                assert not optimizer.is_ahead
            optimizer.step()
        return bits(model.parameters())

    mine, expected = (SimulatedWorld(2).run(functools.partial(train, by_hand=by_hand)) for by_hand in (False, True))
    assert all(map(torch.equal, mine, expected))


@pytest.mark.parametrize("saved", ["compiled", "plain"])
def test_a_state_is_of_the_compiled_model_and_of_the_plain_one(saved):
    def made(compiles, comm):
        model = model_of()
        called = torch.compile(model, backend="eager") if compiles else model
        sgd = INNER["sgd"](model.parameters())
        optimizer = UpdateOptimizer.for_model(sgd, called, comm=comm, density=sparse_at_once, dense_below=0)
        model(batch(comm.rank, 0)).square().mean().backward()
        return optimizer

    def body(comm):
        first, second = made(saved == "compiled", comm), made(saved != "compiled", comm)
        first.step()
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        residuals = [made.state_dict()["distributed"]["residuals"] for made in (first, second)]
        assert residuals[0].keys() == residuals[1].keys() == {"0.weight", "0.bias", "3.weight", "3.bias"}
        assert all(torch.equal(residuals[0][name], residuals[1][name]) for name in residuals[0])

    SimulatedWorld(2).run(body)


def ddpg(comm, actors, leaves):
    """Target network of a critic that is updated behind the step of the actor, and the critic."""
    torch.manual_seed(0)
    critic, actor = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 1)), nn.Linear(10, 10)
    target = copy.deepcopy(critic)
    adam = torch.optim.Adam(critic.parameters(), lr=0.01)
    of_critic = UpdateOptimizer.for_model(adam, critic, comm=comm, density=sparse_at_once)
    of_actor = actors(torch.optim.Adam(actor.parameters(), lr=0.01), actor, comm)
    for step in range(4):
        state = torch.randn(32, 10, generator=torch.Generator().manual_seed(100 * step + comm.rank))
        with torch.no_grad():
            wanted = 1 + 0.9 * target(torch.cat([state, actor(state)], 1))
        of_critic.zero_grad()
        (critic(torch.cat([state, actor(state).detach()], 1)) - wanted).square().mean().backward()
        of_critic.step()
        of_actor.zero_grad()
        (-critic(torch.cat([state, actor(state)], 1)).mean()).backward()
        if leaves:
            of_critic.leave_ahead()
        of_actor.step()
        with torch.no_grad():
            torch._foreach_lerp_(list(target.parameters()), list(critic.parameters()), 0.1)
    return bits([*target.parameters(), *critic.parameters()])


ACTORS = {
    "updates": lambda made, actor, comm: UpdateOptimizer.for_model(made, actor, comm=comm, density=sparse_at_once),
    "gradients": lambda made, actor, comm: DistributedOptimizer(made, actor.named_parameters(), comm=comm, density=1.0),
    "alone": lambda made, actor, comm: made,
}


@pytest.mark.parametrize("actors", ACTORS)
def test_a_critics_target_network_is_of_all_ranks_behind_the_actors_step(actors):
    by_itself, by_hand = (
        SimulatedWorld(3).run(functools.partial(ddpg, actors=ACTORS[actors], leaves=leaves)) for leaves in (False, True)
    )
    assert all(torch.equal(target, by_hand[0]) for target in by_itself + by_hand)


@pytest.mark.parametrize("backward", ["each", "joint"])
def test_models_of_several_optimizers_wait_for_their_backward_behind_the_others_steps(backward):
    """As with plain optimizers: all forwards first, then a backward and a step of each, or one backward for all."""

    def train(comm, follows):
        models, ahead = [model_of(), model_of()], [contextlib.nullcontext, contextlib.nullcontext]
        optimizers = [INNER["sgd"](model.parameters()) for model in models]
        given = {"comm": comm, "density": sparse_at_once}
        if follows:
            wrapped = [UpdateOptimizer.for_model(o, m, **given) for o, m in zip(optimizers, models, strict=True)]
        else:
            given |= {"dense_below": 256}
            named = [model.named_parameters() for model in models]
            wrapped = [UpdateOptimizer(o, n, **given) for o, n in zip(optimizers, named, strict=True)]
            ahead = [optimizer.ahead for optimizer in wrapped]
        for step in range(4):
            with ahead[0](), ahead[1]():
                for optimizer in wrapped:
                    optimizer.zero_grad()
                losses = [model(batch(comm.rank, step)).square().mean() for model in models]
                if backward == "joint" or not follows:
                    sum(losses).backward()
            for loss, optimizer in zip(losses, wrapped, strict=True):
                if backward == "each" and follows:
                    loss.backward()
                optimizer.step()
        return bits([*models[0].parameters(), *models[1].parameters()])

    mine, expected = (SimulatedWorld(2).run(functools.partial(train, follows=follows)) for follows in (True, False))
    assert all(map(torch.equal, mine, expected))


@pytest.mark.parametrize("first", ["frozen", "trained"])
def test_a_discriminator_is_frozen_in_the_turn_of_the_generator(first):
    """Its forward is then one without anything to learn; it may be the first that is followed."""
    torch.manual_seed(0)
    models = generator, discriminator = nn.Linear(4, 8), nn.Linear(8, 1)
    one, other = (UpdateOptimizer.for_model(torch.optim.Adam(m.parameters()), m, steps=20) for m in models)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(3):
            if step or first == "trained":
                other.zero_grad()
                discriminator(torch.randn(8, 8)).square().mean().backward()
                other.step()
            discriminator.requires_grad_(False)
            one.zero_grad()
            discriminator(generator(torch.randn(8, 4))).mean().backward()
            one.step()
            discriminator.requires_grad_(True)
            discriminator.state_dict()


def test_a_model_is_frozen_between_its_own_forward_and_backward():
    """Where others learn through it; its own backward finds the parameters of its forward."""
    torch.manual_seed(0)
    generator = nn.Linear(4, 8)
    discriminator = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    one, other = (
        UpdateOptimizer.for_model(torch.optim.Adam(m.parameters()), m, steps=20) for m in (generator, discriminator)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            other.zero_grad()
            own = discriminator(torch.randn(8, 8)).square().mean()
            discriminator.requires_grad_(False)
            one.zero_grad()
            discriminator(generator(torch.randn(8, 4))).mean().backward()
            one.step()
            discriminator.requires_grad_(True)
            own.backward()
            other.step()


def test_a_layer_that_is_frozen_at_first_is_watched_once_it_learns():
    model = model_of()
    made = INNER["sgd"](model.parameters())
    optimizer = UpdateOptimizer(made, model.named_parameters(), density=0.1)
    model[0].requires_grad_(False)
    with optimizer.ahead():
        model(batch(0, 0)).square().mean().backward()
    assert not model[0].weight._post_accumulate_grad_hooks
    model[0].requires_grad_(True)
    with optimizer.ahead():
        model(batch(0, 0)).square().mean().backward()
    assert model[0].weight._post_accumulate_grad_hooks
