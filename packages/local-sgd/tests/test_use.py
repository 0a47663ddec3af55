"""In a training script: schedulers, groups, scalers, closures, any inner optimizer, buffers, few bits."""

import warnings
from pathlib import Path

import pytest
import torch
from communicators import CollectiveError, SimulatedWorld, allreduce
from local_sgd import BMUF, CoCoDSGD, DiLoCo, LocalSGD, OverlapLocalSGD, StreamingDiLoCo
from torch import nn

pytestmark = pytest.mark.quick

INNER = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "fused sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "own": lambda p: Signs(p, {"lr": 0.1}),
}


class Signs(torch.optim.Optimizer):
    """A user's own."""

    def step(self, closure=None):
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.sub_(p.grad.sign(), alpha=group["lr"])


def by_hand(quadratic, inner, comm, *, steps, tau, dtype=torch.float32):
    """Local SGD in four lines."""
    task = quadratic(comm.rank, dtype=dtype)
    optimizer = inner(task.model.parameters())
    for step in range(steps):
        task.backward(step)
        optimizer.step()
        if (step + 1) % tau == 0:
            mean = allreduce(task.flat(), comm, average=True, native=False)
            torch.nn.utils.vector_to_parameters(mean, task.model.parameters())
    return task.flat()


@pytest.mark.parametrize("inner", INNER)
def test_any_inner_optimizer_and_the_first_block_has_tau_steps(quadratic, inner):
    def wrapped(comm):
        task = quadratic(comm.rank)
        memory = [p.data_ptr() for p in task.model.values()]
        optimizer = LocalSGD(INNER[inner](task.model.parameters()), comm=comm, sync_every=4)
        x = task.train(optimizer, range(10))
        assert [p.data_ptr() for p in task.model.values()] == memory  # the live parameters
        return x, optimizer.finish()

    expected = SimulatedWorld(2).run(lambda comm: by_hand(quadratic, INNER[inner], comm, steps=10, tau=4))
    for (x, _), y in zip(SimulatedWorld(2).run(wrapped), expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("tau", [1, 2, 5])
def test_messages_at_boundaries_only(quadratic, tau):
    def body(comm):
        task = quadratic(comm.rank)
        optimizer = LocalSGD(torch.optim.SGD(task.model.parameters(), lr=0.1), comm=comm, sync_every=tau)
        began, sent = comm.bytes_sent, []
        for step in range(10):
            task.train(optimizer, [step])
            sent.append(comm.bytes_sent - began)
        return sent

    n = 6 + 4 + 1 + 2  # parameters, weight and whether finished
    for rank, sent in enumerate(SimulatedWorld(2).run(body)):
        message = 16 + 4 * n  # of all elements
        assert sent == [message * (step // tau) for step in range(1, 11)], rank


@pytest.mark.parametrize("on", ["wrapper", "wrapped"])
def test_schedulers_on_either(quadratic, on):
    def rates(optimizer, target):
        scheduler = torch.optim.lr_scheduler.StepLR(target, step_size=2, gamma=0.5)
        seen = []
        for step in range(6):
            task.backward(step)
            optimizer.step()
            optimizer.average() if hasattr(optimizer, "average") else None
            scheduler.step()
            seen.append(optimizer.param_groups[0]["lr"])
        return seen

    task = quadratic(0)
    inner = torch.optim.SGD(task.model.parameters(), lr=0.8)
    optimizer = LocalSGD(inner, sync_every=2)
    assert rates(optimizer, optimizer if on == "wrapper" else inner) == [0.8, 0.4, 0.4, 0.2, 0.2, 0.1]


def test_after_the_wrapped_optimizer_loads_it_is_still_shared(quadratic):
    task = quadratic(0)
    optimizer = LocalSGD(torch.optim.SGD(task.model.parameters(), lr=0.1, momentum=0.9), sync_every=2)
    task.train(optimizer, range(3))
    state = optimizer.optimizer.state_dict()
    optimizer.optimizer.load_state_dict(state)
    assert optimizer.param_groups is optimizer.optimizer.param_groups
    assert optimizer.state is optimizer.optimizer.state


def test_groups_of_their_own_rate_and_dtype(quadratic):
    def body(comm):
        one = nn.Linear(3, 2)
        two = nn.Linear(2, 2, dtype=torch.float64)
        groups = [{"params": one.parameters(), "lr": 0.1}, {"params": two.parameters(), "lr": 0.2}]
        with BMUF(torch.optim.SGD(groups), comm=comm, sync_every=2) as optimizer:
            for step in range(5):
                torch.manual_seed(10 * step + comm.rank)
                two(one(torch.randn(4, 3)).double()).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                optimizer.average()
        return torch.cat([p.detach().double().reshape(-1) for p in (*one.parameters(), *two.parameters())])

    ends = SimulatedWorld(3).run(body)
    assert all(torch.equal(end, ends[0]) for end in ends)


@pytest.mark.parametrize("inner", ["sgd", "fused"])
def test_a_scaler_may_leave_out_a_step_on_one_rank_only(quadratic, inner):
    def body(comm):
        task = quadratic(comm.rank)
        optimizer = LocalSGD(INNER[inner](task.model.parameters()), comm=comm, sync_every=2)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(4):
            task.backward(step)
            for p in task.model.values():
                p.grad = scaler.scale(p.grad)
            if comm.rank == 1 and step == 1:
                task.model["a"].grad[0, 0] = float("inf")
            before = task.flat().clone()
            scaler.step(optimizer)
            assert torch.equal(task.flat(), before) == (comm.rank == 1 and step == 1)
            scaler.update()
            optimizer.zero_grad()
            optimizer.average()
        return task.flat(), scaler.get_scale()

    (x, scale), (y, other) = SimulatedWorld(2).run(body)
    assert torch.equal(x, y)
    assert (scale, other) == (8.0, 4.0)


def test_closures(quadratic):
    def body(comm):
        p = nn.Parameter(torch.full((3,), 5.0))
        optimizer = LocalSGD(torch.optim.LBFGS([p], lr=0.5, max_iter=3), comm=comm, sync_every=2)

        def closure():
            optimizer.zero_grad()
            loss = (p - comm.rank).square().sum()
            loss.backward()
            return loss

        losses = []
        for _ in range(6):
            losses.append(float(optimizer.step(closure).detach()))
            optimizer.average()
        return p.detach(), losses

    (p, losses), (q, _) = SimulatedWorld(2).run(body)
    assert torch.equal(p, q)
    assert losses[-1] < losses[0]


def test_a_parameter_without_gradient_on_one_rank_is_averaged_like_the_others():
    def body(comm):
        p, q = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))
        optimizer = LocalSGD(torch.optim.SGD([p, q], lr=1.0), comm=comm, sync_every=1)
        p.grad = torch.ones(2)
        if comm.rank == 0:
            q.grad = torch.full((3,), 4.0)
        optimizer.step()
        optimizer.average()
        return p.detach(), q.detach()

    for p, q in SimulatedWorld(2).run(body):
        assert p.tolist() == [-1.0] * 2
        assert q.tolist() == [-2.0] * 3


def test_frozen_from_the_start_stays_as_it_is():
    def body(comm):
        model = nn.Linear(2, 2)
        model.bias.requires_grad_(False)
        optimizer = BMUF(torch.optim.SGD(model.parameters(), lr=0.1), comm=comm, model=model, sync_every=1)
        bias = model.bias.clone()
        for _ in range(3):
            model(torch.ones(1, 2) * comm.rank).sum().backward()
            optimizer.step()
            optimizer.average()
        assert torch.equal(model.bias, bias)

    SimulatedWorld(2).run(body)


@pytest.mark.parametrize("algorithm", [LocalSGD, CoCoDSGD])
def test_means_are_weighted_by_what_ranks_did(algorithm):
    def body(comm):
        p = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        optimizer = algorithm(torch.optim.SGD([p], lr=1.0), comm=comm, sync_every=2, weighted=True)
        for samples in (10, 20 * comm.rank):
            p.grad = torch.full((1,), -float(comm.rank), dtype=torch.float64)
            optimizer.step()
            optimizer.average(samples)
        optimizer.drain()
        return p.item()

    # rank r stands at 2r, and weighs 10 + 20r
    expected = (10 * 0 + 30 * 2 + 50 * 4) / (10 + 30 + 50)
    for x in SimulatedWorld(3).run(body):
        assert x == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("algorithm", [LocalSGD, CoCoDSGD])
@pytest.mark.parametrize("taken", [4, 5])
def test_the_averaged_model_is_weighted_too(quadratic, algorithm, taken):
    def body(comm):
        task = quadratic(comm.rank)
        inner = torch.optim.SGD(task.model.parameters(), lr=0.1)
        optimizer = algorithm(inner, comm=comm, sync_every=4, weighted=True)
        for step in range(taken):
            task.backward(step)
            optimizer.step()
            optimizer.average(1 + 98 * comm.rank)
        with optimizer.averaged_model():
            shown = task.flat()
        optimizer.finish()
        return shown, task.flat()

    for shown, end in SimulatedWorld(2).run(body):
        torch.testing.assert_close(shown, end)


def test_weights_of_zero_everywhere_change_nothing(quadratic):
    def body(comm):
        task = quadratic(comm.rank)
        inner = torch.optim.SGD(task.model.parameters(), lr=0.1)
        optimizer = OverlapLocalSGD(inner, comm=comm, sync_every=1, weighted=True)
        for step in range(4):
            task.backward(step)
            optimizer.step()
            optimizer.average(0)
        optimizer.state_dict()
        with optimizer.averaged_model():
            assert torch.isfinite(task.flat()).all()
        optimizer.finish()
        return task.flat()

    assert all(torch.isfinite(x).all() for x in SimulatedWorld(2).run(body))


def test_weights_are_given_if_and_only_if_asked_for(quadratic):
    task = quadratic(0)
    plain, weighted = (LocalSGD(torch.optim.SGD(task.model.parameters(), lr=0.1), weighted=w) for w in (False, True))
    with pytest.raises(ValueError, match="make the LocalSGD with weighted=True"):
        plain.average(32)
    with pytest.raises(ValueError, match=r"give the step's weight, such as len\(batch\)"):
        weighted.average()
    with pytest.raises(ValueError, match="weight is -1, expected 0 or more"):
        weighted.average(-1)
    with pytest.raises(TypeError, match="weight is 'all', expected a number"):
        weighted.average("all")


def normalised(comm, algorithm, **options):
    """A model with BatchNorm whose statistics differ between ranks, after some boundaries."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = algorithm(torch.optim.SGD(model.parameters(), lr=0.01), comm=comm, model=model, sync_every=2, **options)
    for step in range(4):
        torch.manual_seed(10 * step + comm.rank)
        model(torch.randn(8, 3) + comm.rank).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.average()
    return model, optimizer


@pytest.mark.slow
@pytest.mark.few(16)
@pytest.mark.parametrize("buffers", ["keep", "average", "broadcast"])
def test_buffers(algorithm, buffers):
    def body(comm):
        model, optimizer = normalised(comm, algorithm, buffers=buffers)
        own = model[1].running_mean.clone()
        with optimizer.averaged_model():
            shown = model[1].running_mean.clone()
            assert model[1].num_batches_tracked == 4
        assert torch.equal(model[1].running_mean, own)
        optimizer.finish()
        return own, shown

    owns, shown = zip(*SimulatedWorld(3).run(body), strict=True)
    assert all(torch.equal(one, shown[0]) for one in shown)
    mean = torch.stack(owns).mean(0)
    torch.testing.assert_close(shown[0], owns[0] if buffers == "broadcast" else mean)
    alike = all(torch.equal(own, owns[0]) for own in owns)
    assert alike == (buffers != "keep")


@pytest.mark.parametrize("policy", ["keep", "average", "reset"])
@pytest.mark.parametrize("algorithm", [LocalSGD, OverlapLocalSGD])
def test_inner_state(quadratic, algorithm, policy):
    def body(comm):
        task = quadratic(comm.rank)
        inner = torch.optim.Adam(task.model.parameters(), lr=0.1)
        optimizer = algorithm(inner, comm=comm, sync_every=3, inner_state=policy)
        task.train(optimizer, range(2))
        task.backward(2)
        optimizer.step()
        before = {name: held.clone() for name, held in inner.state[task.model["a"]].items()}
        optimizer.average()
        return before, dict(inner.state[task.model["a"]]) if task.model["a"] in inner.state else {}

    befores, afters = zip(*SimulatedWorld(2).run(body), strict=True)
    for before, after in zip(befores, afters, strict=True):
        if policy == "reset":
            assert after == {}
            continue
        assert after["step"] == 3
        for name in ("exp_avg", "exp_avg_sq"):
            mean = torch.stack([one[name] for one in befores]).mean(0)
            torch.testing.assert_close(after[name], mean if policy == "average" else before[name])


def test_the_average_of_inner_state_where_a_rank_has_none(quadratic):
    """It counts as zeros, and nothing is made up for it."""

    def body(comm):
        p = nn.Parameter(torch.zeros(2))
        inner = torch.optim.SGD([p], lr=1.0, momentum=0.9)
        optimizer = LocalSGD(inner, comm=comm, sync_every=1, inner_state="average")
        if comm.rank == 0:
            p.grad = torch.full((2,), 4.0)
        optimizer.step()
        optimizer.average()
        return inner.state[p]["momentum_buffer"].tolist() if inner.state.get(p) else None

    assert SimulatedWorld(2).run(body) == [[2.0, 2.0], None]


def test_an_inner_state_that_cannot_be_averaged():
    p = nn.Parameter(torch.ones(2))
    optimizer = LocalSGD(torch.optim.LBFGS([p]), sync_every=1, inner_state="average")

    def closure():
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    with pytest.raises(ValueError, match="what LBFGS keeps cannot be told before a step"):
        optimizer.average()


def test_an_inner_state_that_could_be_averaged_in_part_is_refused():
    """Adafactor keeps the second moment of a matrix as two factors, and that of a bias as it is."""
    model = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=r"Adafactor keeps \['col_var', 'row_var'\], .* take 'keep' or 'reset'"):
        LocalSGD(torch.optim.Adafactor(model.parameters()), inner_state="average")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_averaged_in_thirty_two_and_nothing_is_rounded_away(algorithm, dtype):
    """Boundaries at which nobody has moved move nobody, and what is kept has 32 bits. The next test moves a rank."""

    def body(comm):
        p = nn.Parameter(torch.full((4,), 1.0, dtype=dtype))
        optimizer = algorithm(torch.optim.SGD([p], lr=1.0), comm=comm, sync_every=1)
        for _ in range(3):
            optimizer.average()
        assert torch.equal(p, torch.ones(4, dtype=dtype))
        state = optimizer.state_dict()["distributed"]
        assert all(t.dtype == torch.float32 for kept in state["kept"].values() for t in kept.values())
        optimizer.finish()

    SimulatedWorld(3).run(body)


def test_what_is_rounded_off_waits_until_it_counts():
    ulp = torch.finfo(torch.bfloat16).eps

    def body(comm):
        p = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
        optimizer = LocalSGD(torch.optim.SGD([p], lr=1.0), comm=comm, sync_every=1)
        places = []
        for _ in range(8):
            if comm.rank == 0:
                p.grad = torch.full_like(p, -ulp)
            optimizer.step()
            optimizer.average()
            places.append(p.item())
        return places

    for places in SimulatedWorld(8).run(body):
        assert places[2] == 1.0  # 3/8 of a bit
        assert places[7] == 1.0 + ulp


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_was_rounded_off_is_forgotten_where_other_weights_are_loaded(quadratic, algorithm, dtype):
    def body(comm):
        task = quadratic(comm.rank, dtype=dtype)
        optimizer = algorithm(torch.optim.SGD(task.model.parameters(), lr=0.1), comm=comm, sync_every=3)
        task.train(optimizer, range(4))
        optimizer.finish()
        before = optimizer.state_dict()["distributed"]["remainders"].values()
        assert any(remainder.any() for remainder in before)
        with torch.no_grad():
            for p in task.model.values():
                p.zero_()
                p.grad = torch.zeros_like(p)
        optimizer.step()
        optimizer.average()
        after = optimizer.state_dict()["distributed"]["remainders"].values()
        assert not any(remainder.any() for remainder in after)

    SimulatedWorld(2).run(body)


@pytest.mark.slow
def test_anchors_on_another_device(quadratic, algorithm):
    """Here the only one there is; the arithmetic is on it."""

    def body(comm, device):
        task = quadratic(comm.rank)
        inner = torch.optim.SGD(task.model.parameters(), lr=0.1)
        optimizer = algorithm(inner, comm=comm, sync_every=2, anchor_device=device)
        x = task.train(optimizer, range(7))
        optimizer.finish()
        return x

    one, other = (SimulatedWorld(2).run(lambda comm, d=device: body(comm, d)) for device in ("cpu", None))
    for x, y in zip(one, other, strict=True):
        assert torch.equal(x, y)


@pytest.mark.slow
def test_a_compiled_model_trains_as_the_plain_one():
    def body(comm, compiled):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        model = torch.compile(model, backend="eager") if compiled else model
        with DiLoCo(torch.optim.AdamW(model.parameters()), comm=comm, model=model, sync_every=2) as optimizer:
            for step in range(4):
                torch.manual_seed(10 * step + comm.rank)
                model(torch.randn(8, 3)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                optimizer.average()
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()]), model(torch.ones(1, 3)).item()

    # of one rank, since the compiler is not for threads
    plain, compiled = (SimulatedWorld(1).run(lambda comm, c=c: body(comm, c))[0] for c in (False, True))
    assert torch.equal(plain[0], compiled[0])
    assert plain[1] == compiled[1]


def test_sharded_parameters_are_refused(monkeypatch):
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    class Mesh:
        ndim, device_type = 1, "cpu"

    meta = TensorMeta(torch.Size([4]), (1,), torch.float32)
    spec = DTensorSpec.__new__(DTensorSpec)
    object.__setattr__(spec, "mesh", Mesh())
    object.__setattr__(spec, "placements", (Shard(0),))
    object.__setattr__(spec, "tensor_meta", meta)
    sharded = DTensor.__new__(DTensor, torch.ones(2), spec, requires_grad=True)
    inner = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    inner.param_groups[0]["params"].append(sharded)
    with pytest.raises(TypeError, match=r"parameters \['parameter 1'\] are DTensors.* to average them shard by shard"):
        LocalSGD(inner)


def test_another_tau_from_the_next_block_on(quadratic):
    """For an adaptive one."""

    def body(comm):
        task = quadratic(comm.rank)
        optimizer = LocalSGD(torch.optim.SGD(task.model.parameters(), lr=0.1), comm=comm, sync_every=3)
        at = []
        for step in range(10):
            before = comm.messages_sent
            task.train(optimizer, [step])
            if comm.messages_sent > before:
                at.append(step)
            if step == 1:
                optimizer.sync_every = 2
        return at

    assert SimulatedWorld(2).run(body) == [[2, 4, 6, 8]] * 2


def test_warm_up_with_a_boundary_at_every_step(quadratic):
    def body(comm):
        task = quadratic(comm.rank)
        inner = torch.optim.SGD(task.model.parameters(), lr=0.1)
        optimizer = LocalSGD(inner, comm=comm, sync_every=lambda step: 1 if step < 3 else 4)
        at = []
        for step in range(12):
            before = comm.messages_sent
            task.train(optimizer, [step])
            if comm.messages_sent > before:
                at.append(step)
        return at

    assert SimulatedWorld(2).run(body) == [[0, 1, 2, 6, 10]] * 2


@pytest.mark.parametrize("known", [True, False])
def test_parameters_that_a_load_has_replaced_are_an_error_of_the_next_step(algorithm, known):
    """load_state_dict(assign=True): whether or not the optimizer was given the model."""

    def body(comm):
        model = nn.Linear(3, 2)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = algorithm(inner, comm=comm, sync_every=2, model=model if known else None)
        model.load_state_dict({name: p.detach() + 1 for name, p in model.named_parameters()}, assign=True)
        model(torch.ones(1, 3)).sum().backward()
        with pytest.raises(ValueError, match=rf"than this {algorithm.__name__} was made of: .* and 1 more of 2"):
            optimizer.step()

    SimulatedWorld(2).run(body)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_model_that_was_converted_later_is_an_error_of_the_next_exchange(algorithm, dtype):
    """Means would be in 32 bits, and what is rounded off would be lost."""

    def body(comm):
        model = nn.Linear(3, 2)
        optimizer = algorithm(torch.optim.SGD(model.parameters(), lr=0.1), comm=comm, sync_every=1)
        model.to(dtype)
        model(torch.ones(1, 3, dtype=dtype)).sum().backward()
        optimizer.step()
        with pytest.raises(ValueError, match=rf"2 parameters have other dtypes .* before and \({dtype}, .* now"):
            optimizer.average()

    SimulatedWorld(2).run(body)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.add_module("1", nn.Linear(2, 2)),
        lambda model: nn.utils.parametrizations.weight_norm(model[1]),
        lambda model: model[2].requires_grad_(True),
    ],
    ids=["replaced", "parametrized", "unfrozen"],
)
def test_what_came_into_the_model_later_and_is_not_trained_is_told(change):
    def body(comm):
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2), nn.Linear(2, 1).requires_grad_(False))
        inner = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        optimizer = LocalSGD(inner, comm=comm, model=model, sync_every=1)
        change(model)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        with pytest.raises(
            ValueError, match=r"trainable parameters that the optimizer does not have: \['[12]\..*drain"
        ):
            optimizer.average()

    SimulatedWorld(2).run(body)


def said_in_steps(task, optimizer, steps, *, averages):
    """Where warnings were, and of which step."""
    said = []
    for step in range(steps):
        task.backward(step)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        said += [(step, Path(one.filename).name, str(one.message)) for one in caught]
        optimizer.zero_grad()
        if averages(step):
            optimizer.average()
    return said


@pytest.mark.slow
@pytest.mark.parametrize(("tau", "every"), [(3, 3), (lambda step: 3, 3), (1, 2), ("two levels", 2)])
def test_a_forgotten_average_is_said_once_where_an_exchange_would_have_been(quadratic, algorithm, tau, every):
    if algorithm is StreamingDiLoCo:  # exchanges a fragment before the block ends
        every = 2
    if tau == "two levels" and algorithm not in (LocalSGD, DiLoCo):
        tau, every = 2, 2

    def body(comm):
        task = quadratic(comm.rank)
        inner = torch.optim.SGD(task.model.parameters(), lr=0.1)
        levels = {"sync_every": [(comm, 1), (comm, 100)]} if tau == "two levels" else {"sync_every": tau, "comm": comm}
        optimizer = algorithm(inner, **levels)
        optimizer.average()
        return said_in_steps(task, optimizer, 9, averages=lambda step: False)

    for said in SimulatedWorld(2).run(body):
        assert [(step, file) for step, file, _ in said] == [(every - 1, "test_use.py")]
        assert f"{every} steps of {algorithm.__name__} since the last average(), which counts them" in said[0][2]


def test_an_average_of_so_many_steps_at_once_is_said_too(quadratic):
    """It counts one."""
    task = quadratic(0)
    optimizer = LocalSGD(torch.optim.SGD(task.model.parameters(), lr=0.1), sync_every=4)
    said = said_in_steps(task, optimizer, 12, averages=lambda step: step % 4 == 3)
    assert [step for step, *_ in said] == [3]


def loaded(model, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))


def test_steps_of_the_wrapped_optimizer_itself_are_steps(quadratic, algorithm):
    """As a framework may take them that was given that one."""

    def body(comm):
        task = quadratic(comm.rank)
        inner = torch.optim.SGD(task.model.parameters(), lr=0.1)
        optimizer = algorithm(inner, comm=comm, sync_every=2)
        for step in range(5):
            task.backward(step)
            inner.step()
            optimizer.average()
        optimizer.finish()
        return task.flat()

    one, other = SimulatedWorld(2).run(body)
    assert torch.equal(one, other)


def test_weights_that_some_ranks_only_have_loaded_are_an_error_at_the_first_boundary(quadratic, algorithm):
    def body(comm):
        task = quadratic(comm.rank)
        inner = torch.optim.SGD(task.model.parameters(), lr=0.1)
        optimizer = algorithm(inner, comm=comm, sync_every=2)
        if comm.rank == 0:
            loaded(task.model, 5)
        for step in range(4):
            task.train(optimizer, [step])
        optimizer.finish()

    with pytest.raises(
        CollectiveError, match=r"begun with parameters of hash \w{16} \(load weights on all ranks alike"
    ):
        SimulatedWorld(2).run(body)


def test_models_that_share_parameters_and_not_an_optimizer_are_an_error_that_says_so():
    def body(comm):
        torch.manual_seed(0)
        shared, heads = torch.nn.Linear(3, 3), [torch.nn.Linear(3, 1) for _ in range(2)]
        models = [torch.nn.Sequential(shared, head) for head in heads]
        inner = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        both = [LocalSGD(one, model=model, comm=comm, sync_every=1) for one, model in zip(inner, models, strict=True)]
        for optimizer, model in zip(both, models, strict=True):
            model(torch.full((2, 3), float(comm.rank + 1))).sum().backward()
            optimizer.step()
        for optimizer in both:
            optimizer.average()

    with pytest.raises(CollectiveError, match="and give models that share parameters one optimizer"):
        SimulatedWorld(2).run(body)


@pytest.mark.slow
@pytest.mark.parametrize("drained", [False, True])
def test_weights_that_all_ranks_load_are_where_training_begins(quadratic, algorithm, drained):
    """Not what the anchors were when the optimizer was made, or at the last drain."""

    def body(comm, loads):
        task = quadratic(comm.rank)
        loaded(task.model, 6 if loads else 5)
        inner = torch.optim.SGD(task.model.parameters(), lr=0.1)
        optimizer = algorithm(inner, comm=comm, sync_every=2)
        if loads and drained:
            optimizer.drain()
        loaded(task.model, 5)
        task.train(optimizer, range(5))
        optimizer.finish()
        return task.flat()

    expected, found = (SimulatedWorld(2).run(lambda comm, loads=loads: body(comm, loads)) for loads in (False, True))
    for x, y in zip(expected, found, strict=True):
        assert torch.equal(x, y)


@pytest.mark.slow
@pytest.mark.few(18)
@pytest.mark.parametrize("buffers", ["keep", "average", "broadcast"])
@pytest.mark.parametrize("end", ["drain", "finish"])
def test_at_the_end_buffers_are_alike_too(algorithm, buffers, end):
    def body(comm):
        model, optimizer = normalised(comm, algorithm, buffers=buffers)
        own = model[1].running_mean.clone()
        getattr(optimizer, end)()
        return own, list(model.buffers())

    owns, ends = zip(*SimulatedWorld(3).run(body), strict=True)
    for buffers_of_rank in ends:
        assert all(torch.equal(one, first) for one, first in zip(buffers_of_rank, ends[0], strict=True))
    if buffers != "broadcast":
        torch.testing.assert_close(ends[0][0], torch.stack(owns).mean(0))


def test_before_the_first_step_the_model_is_what_was_loaded(quadratic, algorithm):
    def body(comm):
        task = quadratic(comm.rank)
        optimizer = algorithm(torch.optim.SGD(task.model.parameters(), lr=0.1), comm=comm, sync_every=2)
        loaded(task.model, 5)
        own = task.flat()
        with optimizer.averaged_model():
            torch.testing.assert_close(task.flat(), own)

    SimulatedWorld(2).run(body)
