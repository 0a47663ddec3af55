"""DistributedOptimizer(overlap=True): the same sums, started while backward goes on."""

import gc

import pytest
import torch
from communicators import Link, SimulatedWorld
from data_parallel import DistributedOptimizer
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_collectives import ALGORITHMS
from sparse_compress import TopK
from torch import nn

pytestmark = pytest.mark.quick

SHAPES = ((3, 4), (5,), (2, 2), (1,))


class Weights(nn.Module):
    """The gradient of each parameter is what the loss multiplies it with."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in SHAPES)

    def loss(self, gradients):
        used = [(w * g).sum() for w, g in zip(self.weights, gradients, strict=True) if g is not None]
        return sum(used)


def drawn(seed, unused=()):
    generator = torch.Generator().manual_seed(seed)
    gradients = [torch.randint(-9, 10, shape, generator=generator).float() for shape in SHAPES]
    return [None if i in unused else g for i, g in enumerate(gradients)]


def optimizer_of(model, comm, **options):
    options = {"compressor": TopK(0.2), "overlap": True, "bucket_bytes": 40, **options}
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    return DistributedOptimizer(inner, model.named_parameters(), comm=comm, **options)


def state_of(model, optimizer):
    residuals = optimizer.state_dict()["distributed"]["residuals"]
    return [p.detach().clone() for p in model.parameters()] + [r.clone() for _, r in sorted(residuals.items())]


@pytest.mark.slow
@pytest.mark.few(4)
@pytest.mark.parametrize("name", ALGORITHMS)
@settings(max_examples=settings.default.max_examples // 3)
@given(size=st.sampled_from([1, 2, 3, 4]), seed=st.integers(0, 99), unused=st.sets(st.integers(0, 3), max_size=3))
def test_started_in_backward_or_at_the_step_the_bits_are_the_same(name, size, seed, unused):
    def body(comm, in_backward):
        model = Weights()
        optimizer = optimizer_of(model, comm, algorithm=name)
        for step in range(3):
            optimizer.zero_grad()
            gradients = drawn(100 * seed + 10 * step + comm.rank, unused if comm.rank else ())
            if in_backward:
                model.loss(gradients).backward()
            else:  # nothing tells the optimizer of these before its step
                for w, g in zip(model.weights, gradients, strict=True):
                    w.grad = g
            optimizer.step()
        return state_of(model, optimizer)

    one = SimulatedWorld(size).run(lambda comm: body(comm, in_backward=True))
    other = SimulatedWorld(size).run(lambda comm: body(comm, in_backward=False))
    for rank in range(size):
        assert all(torch.equal(a, b) for a, b in zip(one[rank], other[rank], strict=True))


def test_a_second_training_of_the_same_parameters_meets_nothing_of_the_first():
    """One that waited for a collection of garbage started exchanges in the second's backward, where ranks had it."""

    def body(comm):
        model = Weights()
        for _ in range(2):  # as of cross-validation, or a cell that is run again
            optimizer = optimizer_of(model, comm)
            for step in range(2):
                model.loss(drawn(10 * step + comm.rank)).backward()
                optimizer.step()
                optimizer.zero_grad()
            del optimizer
        return state_of(model, optimizer_of(model, comm))

    gc.disable()
    try:
        one, other = SimulatedWorld(2).run(body)
    finally:
        gc.enable()
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", ["gtopk", "dense"])
def test_the_exchange_is_hidden_behind_backward(name):
    """Virtual time: each parameter's gradient takes 1 s to compute, each bucket's exchange less."""

    def body(comm, overlap):
        model = Weights()
        optimizer = optimizer_of(model, comm, algorithm=name, overlap=overlap)
        for weight in model.weights:
            weight.register_hook(lambda gradient: comm.elapse(1.0))
        begin = comm.clock()
        model.loss(drawn(1)).backward()
        optimizer.step()
        return comm.clock() - begin

    link = Link(alpha=0.2, beta=0.0)
    [shown] = set(SimulatedWorld(2, link).run(lambda comm: body(comm, overlap=False)))
    [hidden] = set(SimulatedWorld(2, link).run(lambda comm: body(comm, overlap=True)))
    buckets = 3
    assert shown == pytest.approx(4.0 + (1 if name == "dense" else buckets) * 0.2, abs=0.5)
    assert hidden == pytest.approx(4.0 + 0.2)  # only the last bucket's shows


def test_accumulation_belongs_into_no_sync():
    def body(comm):
        model = Weights()
        optimizer = optimizer_of(model, comm, compressor=TopK(1.0))
        with optimizer.no_sync():
            model.loss(drawn(comm.rank)).backward()
        model.loss(drawn(comm.rank)).backward()
        optimizer.step()
        once = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        model.loss(drawn(comm.rank)).backward()
        with pytest.raises(RuntimeError, match="accumulate inside no_sync"):
            model.loss(drawn(comm.rank)).backward()
        return once

    [one, other] = SimulatedWorld(2).run(body)
    expected = [-(a + b) for a, b in zip(drawn(0), drawn(1), strict=True)]  # twice the mean of two
    assert all(torch.equal(x, y) for x, y in zip(one, expected, strict=True))
    assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


def test_gradients_under_way_cannot_be_thrown_away():
    def body(comm):
        model = Weights()
        optimizer = optimizer_of(model, comm)
        model.loss(drawn(comm.rank)).backward()
        with pytest.raises(RuntimeError, match="zero_grad\\(\\) while gradients are under way"):
            optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()

    SimulatedWorld(2).run(body)


def exchange_of_a_whole_backward(model, optimizer, comm):
    optimizer.zero_grad()
    model.loss(drawn(comm.rank)).backward()
    optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_a_partial_backward_can_be_thrown_away():
    """Of weights that alone do not complete the first bucket: only rank 1 does it, and nothing has been sent."""

    def body(comm, probes):
        model = Weights()
        optimizer = optimizer_of(model, comm, compressor=TopK(1.0))
        if probes and comm.rank == 1:
            model.loss([torch.full(SHAPES[0], 7.0), None, torch.full(SHAPES[2], 7.0), None]).backward()
        return exchange_of_a_whole_backward(model, optimizer, comm)

    expected = SimulatedWorld(2).run(lambda comm: body(comm, probes=False))
    for result in SimulatedWorld(2).run(lambda comm: body(comm, probes=True)):
        assert torch.equal(result, expected[0])


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
def test_a_backward_that_fails_can_be_thrown_away(bucket_bytes):
    def body(comm):
        model = Weights()
        optimizer = optimizer_of(model, comm, compressor=TopK(1.0), bucket_bytes=bucket_bytes)

        def fail(gradient):
            raise MemoryError("full")

        hook = model.weights[0].register_hook(fail)
        with pytest.raises(MemoryError):
            model.loss(drawn(comm.rank)).backward()
        hook.remove()
        if bucket_bytes == 1:  # then the buckets of the other weights may have been sent
            with pytest.raises(RuntimeError, match=r"synchronize\(\) and then zero_grad\(\), on every rank"):
                optimizer.zero_grad()
            optimizer.synchronize()
        return exchange_of_a_whole_backward(model, optimizer, comm)

    one, other = SimulatedWorld(2).run(body)
    expected = -sum(torch.cat([g.flatten() for g in drawn(rank)]) for rank in (0, 1)) / 2
    assert torch.equal(one, expected)
    assert torch.equal(other, expected)


def test_a_second_backward_before_anything_is_sent_is_told_how_to_discard_the_first():
    model = Weights()
    optimizer = optimizer_of(model, None)
    probe = [torch.ones(SHAPES[0]), None, None, None]
    model.loss(probe).backward()
    with pytest.raises(RuntimeError, match=r"thrown away ends with optimizer\.zero_grad"):
        model.loss(probe).backward()
    optimizer.zero_grad()
    model.loss(probe).backward()
    optimizer.step()


def test_a_grad_scaler_is_told_what_to_use():
    model = Weights()
    optimizer = optimizer_of(model, None, nonfinite="skip")
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model.loss(drawn(0))).backward()
    with pytest.raises(RuntimeError, match="overlap=False"):
        scaler.step(optimizer)


def replaced(model, optimizer):
    for p in model.parameters():
        p.grad = p.grad / 2


@pytest.mark.parametrize("name", ["gtopk", "dense"])
@pytest.mark.parametrize(
    "change",
    [
        lambda model, optimizer: nn.utils.clip_grad_norm_(model.parameters(), 0.01),
        lambda model, optimizer: [p.grad.mul_(0) for p in model.parameters()],
        lambda model, optimizer: model.zero_grad(),
        lambda model, optimizer: model.zero_grad(set_to_none=False),
        replaced,
    ],
)
def test_gradients_that_were_sent_are_not_changed_in_vain(name, change):
    def body(comm):
        model = Weights()
        optimizer = optimizer_of(model, comm, algorithm=name)
        model.loss(drawn(comm.rank)).backward()
        change(model, optimizer)
        with pytest.raises(RuntimeError, match=r"'weights\.3' was changed.*after synchronize\(\).*clip_norm="):
            optimizer.step()
        assert not any(p.any() for p in model.parameters())
        exchange_of_a_whole_backward(model, optimizer, comm)  # nothing is under way

    SimulatedWorld(2).run(body)


def test_nor_by_a_hook_that_comes_after_the_exchange():
    model = Weights()
    optimizer = optimizer_of(model, None, bucket_bytes=1)

    def clamp(p):
        p.grad.clamp_(-1, 1)

    model.weights[3].register_post_accumulate_grad_hook(clamp)
    model.loss(drawn(1)).backward()
    with pytest.raises(RuntimeError, match=r"'weights\.3' was changed"):
        optimizer.step()


@pytest.mark.parametrize("name", ["gtopk", "dense"])
def test_gradients_may_be_changed_where_nothing_was_sent_or_all_has_come(name):
    def body(comm):
        model = Weights()
        optimizer = optimizer_of(model, comm, algorithm=name)
        flat = torch.zeros(40)
        for p in model.parameters():  # views of one tensor, which share a version
            p.grad, flat = flat[: p.numel()].view_as(p), flat[p.numel() :]
        for set_to_none in (False, True):
            optimizer.zero_grad(set_to_none)
            with optimizer.no_sync():
                model.loss(drawn(comm.rank)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            model.loss(drawn(comm.rank, unused=(2,))).backward()
            optimizer.synchronize()
            for p in model.parameters():
                p.grad.mul_(2)
            optimizer.step()

        def closure():
            optimizer.zero_grad()
            loss = model.loss(drawn(comm.rank))
            loss.backward()
            return loss

        optimizer.step(closure)

    SimulatedWorld(2).run(body)


def test_a_grad_scaler_unscales_after_synchronize():
    model = Weights()
    optimizer = optimizer_of(model, None, algorithm="dense", nonfinite="skip")
    for synchronizes in (True, False):
        optimizer.zero_grad()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scaler.scale(model.loss(drawn(0))).backward()
        if synchronizes:
            optimizer.synchronize()
        scaler.unscale_(optimizer)
        if synchronizes:
            scaler.step(optimizer)
            assert torch.equal(model.weights[0], -drawn(0)[0])
        else:
            with pytest.raises(RuntimeError, match=r"unscale_.*synchronize\(\)"):
                scaler.step(optimizer)
