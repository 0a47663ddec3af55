"""The exchange runs while the next block computes: in virtual time, exactly."""

import pytest
import torch
from communicators import Link, SimulatedWorld
from communicators import run as run_now
from local_sgd import EASGD, CoCoDSGD, DiLoCo, LocalSGD, OverlapLocalSGD, averaging
from sparse_collectives import sparse_allreduce
from sparse_compress import ErrorFeedback, TopK
from torch import nn

STEP_SECONDS = 1e-3


def run(quadratic, algorithm, link, *, tau=2, blocks=10):
    """(virtual seconds of training without the last drain, hidden fraction) of two ranks."""
    world = SimulatedWorld(2, link)

    def body(comm):
        task = quadratic(comm.rank)
        optimizer = algorithm(torch.optim.SGD(task.model.parameters(), lr=0.1), comm=comm, sync_every=tau)
        assert optimizer.hidden_fraction is None
        began = comm.clock()
        for step in range(tau * blocks):
            comm.elapse(STEP_SECONDS)
            task.train(optimizer, [step])
        seconds, hidden = comm.clock() - began, optimizer.hidden_fraction
        optimizer.finish()
        return seconds, hidden

    return world.run(body)[0]


@pytest.mark.parametrize("algorithm", [CoCoDSGD, EASGD, OverlapLocalSGD])
def test_an_exchange_that_takes_less_than_a_block_is_hidden(quadratic, algorithm):
    seconds, hidden = run(quadratic, algorithm, Link(0.8e-3, 0.0))  # one message
    assert seconds == pytest.approx(20 * STEP_SECONDS)
    assert hidden == 1.0


@pytest.mark.parametrize("algorithm", [CoCoDSGD, EASGD, OverlapLocalSGD])
def test_of_a_longer_one_what_is_left_is_waited_for(quadratic, algorithm):
    seconds, hidden = run(quadratic, algorithm, Link(8e-3, 0.0))  # a message, of which a block hides 2
    assert hidden == pytest.approx(0.25, rel=0.01)
    assert seconds == pytest.approx(20 * STEP_SECONDS + 9 * 6e-3, rel=0.01)


def test_without_overlap_nothing_is_hidden(quadratic):
    seconds, hidden = run(quadratic, LocalSGD, Link(0.8e-3, 0.0))
    assert hidden == 0.0
    assert seconds == pytest.approx(20 * STEP_SECONDS + 10 * 0.8e-3, rel=0.01)


@pytest.mark.parametrize("algorithm", [CoCoDSGD, EASGD, OverlapLocalSGD])
def test_parameters_may_change_while_their_mean_travels(quadratic, algorithm):
    """What was launched is what they were then."""

    def body(comm, spoil):
        task = quadratic(comm.rank)
        optimizer = algorithm(torch.optim.SGD(task.model.parameters(), lr=0.1), comm=comm, sync_every=1)
        task.train(optimizer, range(2))
        own = task.flat().clone()
        if spoil:
            for p in task.model.values():
                p.data.fill_(777.0)
            comm.elapse(1.0)
            torch.nn.utils.vector_to_parameters(own, task.model.parameters())
        x = task.train(optimizer, range(2, 4))
        optimizer.finish()
        return x

    one, other = (SimulatedWorld(3).run(lambda comm, s=spoil: body(comm, s)) for spoil in (False, True))
    for x, y in zip(one, other, strict=True):
        assert torch.equal(x, y)


def test_evaluation_is_not_counted(quadratic):
    def body(comm):
        task = quadratic(comm.rank)
        optimizer = CoCoDSGD(torch.optim.SGD(task.model.parameters(), lr=0.1), comm=comm, sync_every=1)
        for step in range(4):
            comm.elapse(STEP_SECONDS)
            task.train(optimizer, [step])
            with optimizer.averaged_model():
                pass
        hidden = optimizer.hidden_fraction
        optimizer.finish()
        return hidden

    assert SimulatedWorld(2, Link(0.4e-3, 0.0)).run(body) == [1.0, 1.0]


@pytest.mark.parametrize(("bucket_bytes", "waits"), [(None, 1), (160, 0)])
def test_vectors_of_one_mean_are_under_way_at_once(monkeypatch, bucket_bytes, waits):
    """A single one is waited for in its turn; of several none is before all have begun."""
    waited = []
    monkeypatch.setattr(averaging, "run", lambda *given, **how: waited.append(given) or run_now(*given, **how))

    def body(comm):
        model = nn.ParameterList(nn.Parameter(torch.zeros(40)) for _ in range(3))
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = LocalSGD(inner, comm=comm, sync_every=1, bucket_bytes=bucket_bytes)
        for p in model:
            p.grad = torch.full((40,), float(comm.rank))
        optimizer.step()
        optimizer.average()
        seen = len(waited)
        optimizer.finish()
        return seen, torch.cat([p.detach() for p in model])

    [(seen, x)] = SimulatedWorld(1).run(body)
    assert seen == waits
    assert not x.any()


def test_a_large_model_is_cut_into_several_vectors():
    """Each small enough for the C library to keep its memory."""
    model = nn.ParameterList(nn.Parameter(torch.zeros(2_000_000)) for _ in range(4))
    optimizer = LocalSGD(torch.optim.SGD(model.parameters(), lr=0.1), sync_every=1)
    assert [part.bucket.numel for part in optimizer._driver.parts] == [6_000_000, 2_000_000]
    compress = ErrorFeedback(TopK(0.01))  # among all elements
    optimizer = DiLoCo(
        torch.optim.SGD(model.parameters(), lr=0.1), sync_every=1, compress=compress, allreduce=sparse_allreduce
    )
    assert [part.bucket.numel for part in optimizer._driver.parts] == [8_000_000]
