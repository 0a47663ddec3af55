"""NaN and inf: the same error, or the same skipped step, on every rank."""

import pytest
import torch
from communicators import CollectiveError, SimulatedWorld
from data_parallel import DistributedOptimizer
from sparse_collectives import ALGORITHMS
from sparse_compress import RandomK, TopK
from torch import nn

NAN, INF = float("nan"), float("inf")
every_algorithm = pytest.mark.parametrize("name", ALGORITHMS)

pytestmark = [pytest.mark.quick, pytest.mark.filterwarnings("ignore:Adam behind a sparse", "ignore:momentum= and Adam")]


def make(comm, name, **options):
    model = nn.ParameterDict({key: nn.Parameter(torch.zeros(4)) for key in "abc"})
    inner = torch.optim.Adam(model.parameters(), lr=0.1)
    return model, DistributedOptimizer(
        inner, model.named_parameters(), comm=comm, algorithm=name, compressor=TopK(0.5), **options
    )


def fill(model, step, rank):
    generator = torch.Generator().manual_seed(17 * step + rank)
    for p in model.values():
        p.grad = torch.randn(4, generator=generator)


@every_algorithm
@pytest.mark.parametrize("bucket_bytes", [None, 16])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_every_rank_raises_the_lowest_culprit_by_name(name, bucket_bytes, bad):
    def body(comm):
        model, optimizer = make(comm, name, bucket_bytes=bucket_bytes)
        fill(model, 0, comm.rank)
        if comm.rank in (1, 2):
            model["c" if comm.rank == 2 else "b"].grad[3] = bad
        with pytest.raises(CollectiveError) as error:
            optimizer.step()
        assert not model["a"].any()
        return str(error.value)

    told = SimulatedWorld(3).run(body)
    assert len(set(told)) == 1
    assert "rank 1: the gradient of 'b' is not finite" in told[0]
    assert "nonfinite='skip'" in told[0]


@every_algorithm
def test_large_gradients_whose_own_sum_overflows_are_finite(name):
    model, optimizer = make(None, name)
    model["a"].grad = torch.full((4,), 3e38)
    optimizer.step()


def test_a_sum_that_overflows_is_told_apart():
    def body(comm):
        model, optimizer = make(comm, "gtopk")
        model["a"].grad = torch.full((4,), 3e38)
        with pytest.raises(CollectiveError, match="it overflowed"):
            optimizer.step()

    SimulatedWorld(2).run(body)


@pytest.mark.few(8)
@every_algorithm
@pytest.mark.parametrize("bucket_bytes", [None, 16])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_a_skipped_step_leaves_no_trace(name, bucket_bytes, momentum):
    """A run with a bad step in the middle ends in the same bits as one without that step."""
    momentum = momentum if ALGORITHMS[name].selects else 0.0

    def train(comm, steps):
        model, optimizer = make(comm, name, bucket_bytes=bucket_bytes, nonfinite="skip", momentum=momentum)
        for step in steps:
            fill(model, step or 99, comm.rank)
            if not step and comm.rank == 1:
                model["b"].grad[0] = INF
            optimizer.step()
            if not step:
                assert not all(p.grad.isfinite().all() for p in model.values())  # seen on every rank
        state = optimizer.state_dict()
        own = state["distributed"]
        tensors = (
            [p.detach() for p in model.values()] + list(own["residuals"].values()) + list(own["velocities"].values())
        )
        tensors += [value for entry in state["state"].values() for value in entry.values()]
        return torch.cat([tensor.view(-1) for tensor in tensors]), optimizer.skipped

    clean = SimulatedWorld(3).run(lambda comm: train(comm, [1, 2, 3, 4]))
    dirty = SimulatedWorld(3).run(lambda comm: train(comm, [1, 2, 0, 3, 0, 4]))
    for (one, none), (other, two) in zip(clean, dirty, strict=True):
        assert torch.equal(one, other)
        assert (none, two) == (0, 2)


@pytest.mark.parametrize("by_hand", [False, True])
def test_grad_scaler_skips_on_every_rank_and_residuals_are_unscaled(by_hand):
    def body(comm):
        model = nn.ParameterDict({"a": nn.Parameter(torch.zeros(4))})
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = DistributedOptimizer(
            inner, model.named_parameters(), comm=comm, compressor=TopK(0.5), nonfinite="skip"
        )
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
        for step in range(3):
            optimizer.zero_grad()
            gradient = torch.tensor([4.0, 3.0, 2.0, 1.0])
            if step == 1 and comm.rank == 1:
                gradient[0] = INF
            scaler.scale((model["a"] * gradient).sum()).backward()
            if by_hand:
                scaler.unscale_(optimizer)
                optimizer.synchronize()
            scaler.step(optimizer)
            scaler.update()
        return model["a"].tolist(), optimizer.state_dict()["distributed"]["residuals"]["a"].tolist(), optimizer.skipped

    results = SimulatedWorld(2).run(body)
    # Steps 0 and 2 count: (4, 3, 0, 0) is applied and (0, 0, 2, 1) stays; then acc is (4, 3, 4, 2).
    assert results[0][0] == results[1][0] == [-8, -3, -4, 0]
    assert [sum(column) for column in zip(results[0][1], results[1][1], strict=True)] == [0, 6, 0, 4]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_loop_may_leave_a_step_out_after_synchronize(overlap):
    """Its mean does not stand, and the next synchronize() exchanges anew, so the backward before it is no error."""

    def body(comm):
        model = nn.Linear(2, 1)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(
            inner, model.named_parameters(), comm=comm, compressor=TopK(0.5), nonfinite="skip", overlap=overlap
        )
        left_out = 0
        for step in range(4):
            model.zero_grad()
            factor = INF if step == 1 and comm.rank == 1 else 1.0 + step + comm.rank
            model(torch.full((1, 2), factor)).sum().backward()
            optimizer.synchronize()
            if not torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).isfinite():
                left_out += 1
                continue
            optimizer.step()
        return left_out, [p.tolist() for p in model.parameters()]

    one, other = SimulatedWorld(2).run(body)
    assert one == other
    assert one[0] == 1


def test_scaled_gradients_in_synchronize_are_told():
    model = nn.ParameterDict({"a": nn.Parameter(torch.zeros(4))})
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model["a"].sum()).backward()
    optimizer.synchronize()
    with pytest.raises(RuntimeError, match=r"scaler\.unscale_"):
        scaler.step(optimizer)


@pytest.mark.parametrize("seed", range(5))
def test_what_was_not_selected_is_noticed_too(seed):
    """Random-k sends one element of twelve: the NaN is hardly ever among them."""

    def body(comm):
        model = nn.ParameterDict({key: nn.Parameter(torch.zeros(4)) for key in "abc"})
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(
            inner, model.named_parameters(), comm=comm, compressor=RandomK(0.08, seed=seed)
        )
        fill(model, 0, comm.rank)
        if comm.rank == 1:
            model["b"].grad[2] = NAN
        with pytest.raises(CollectiveError, match="rank 1: the gradient of 'b' is not finite"):
            optimizer.step()

    SimulatedWorld(3).run(body)


def test_schedulers_that_part_after_a_skipped_step_are_told_at_the_next():
    """Only the scaler of the rank with the inf lowers its scale."""

    def body(comm):
        model = nn.Linear(4, 2)
        optimizer = DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), comm=comm, nonfinite="skip"
        )
        scaler = torch.amp.GradScaler("cpu")
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0.1, total_iters=9)
        for step in range(6):
            optimizer.zero_grad()
            bad = (step, comm.rank) == (3, 1)
            scaler.scale(model(torch.full((1, 4), INF if bad else 1.0)).square().mean()).backward()
            before, skipped = scaler.get_scale(), optimizer.skipped
            scaler.step(optimizer)
            scaler.update()
            if optimizer.skipped == skipped if shared else scaler.get_scale() >= before:
                scheduler.step()
        return scheduler.get_last_lr(), [p.tolist() for p in model.parameters()]

    shared = False
    with pytest.raises(CollectiveError, match=r"lr.*after a skipped step: let schedulers follow \.skipped"):
        SimulatedWorld(2).run(body)
    shared = True
    one, other = SimulatedWorld(2).run(body)
    assert one == other
