"""local_sgd with what sparse packages give it, and two levels on real ranks."""

from pathlib import Path

import pytest
import torch
from communicators import SimulatedWorld
from local_sgd import DiLoCo, LocalSGD, StreamingDiLoCo
from sparse_collectives import sparse_allreduce, sparse_allreduce_async
from sparse_compress import ErrorFeedback, TopK

N = 900
HERE = Path(__file__).parent


def at_once(sent, comm):
    return sparse_allreduce(sent, comm, k=len(sent.indices), algorithm="gtopk")


def meanwhile(sent, comm):
    return sparse_allreduce_async(sent, comm, k=len(sent.indices), algorithm="topk-allgather")


@pytest.mark.parametrize("m", [1, 2, 3])
@pytest.mark.parametrize("allreduce", [at_once, meanwhile])
def test_nothing_is_lost_and_all_agree(m, allreduce):
    """What ranks did is in the model or in the residuals, what a collective dropped included."""

    def body(comm):
        p = torch.nn.Parameter(torch.zeros(N, dtype=torch.float64))
        feedback = ErrorFeedback(TopK(0.02))
        sgd = torch.optim.SGD([p], lr=1.0)
        optimizer = LocalSGD(sgd, comm=comm, sync_every=1, compress=feedback, allreduce=allreduce)
        moved = torch.zeros_like(p)
        for step in range(6):
            p.grad = torch.randn(N, generator=torch.Generator().manual_seed(10 * step + comm.rank)).double()
            moved -= p.grad
            optimizer.step()
            optimizer.average()
        return p.detach().clone(), moved, feedback.residual("parameter 0").clone()

    models, moved, residuals = zip(*SimulatedWorld(m).run(body), strict=True)
    assert all(torch.equal(model, models[0]) for model in models)
    torch.testing.assert_close(models[0] * m + sum(residuals), sum(moved), rtol=0, atol=1e-9)


@pytest.mark.parametrize("algorithm", [DiLoCo, StreamingDiLoCo])
@pytest.mark.parametrize("allreduce", [at_once, meanwhile])
@pytest.mark.parametrize("at", [3, 5])
def test_resumed_runs_have_the_same_bits(algorithm, allreduce, at):
    def body(comm, stop):
        def begin():
            ps = [torch.nn.Parameter(torch.zeros(N)) for _ in range(3)]
            adam = torch.optim.Adam(ps, lr=0.1)
            given = {"compress": ErrorFeedback(TopK(0.02)), "allreduce": allreduce}
            return ps, algorithm(adam, comm=comm, sync_every=4, **given)

        ps, optimizer = begin()
        for step in range(11):
            if step == stop:
                xs, state = [p.detach().clone() for p in ps], optimizer.state_dict()
                ps, optimizer = begin()
                for p, x in zip(ps, xs, strict=True):
                    p.data.copy_(x)
                optimizer.load_state_dict(state)
            for i, p in enumerate(ps):
                p.grad = torch.randn(N, generator=torch.Generator().manual_seed(100 * step + 10 * i + comm.rank))
            optimizer.step()
            optimizer.average()
        xs = torch.cat(ps).detach().clone()
        optimizer.finish()
        return torch.stack([xs, torch.cat(ps).detach()])

    straight, resumed = (SimulatedWorld(2).run(lambda comm, s=stop: body(comm, s)) for stop in (None, at))
    for one, other in zip(straight, resumed, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(straight[0][1], straight[1][1])


@pytest.mark.mpi
def test_two_levels_on_mpi_have_the_bits_of_the_simulated_world(mpiexec):
    done = mpiexec(4, HERE / "levels_on_ranks.py", "mpi")
    assert done.returncode == 0, done.stderr


@pytest.mark.few(0)
def test_two_levels_on_gloo_have_the_bits_of_the_simulated_world(processes):
    for done in processes(4, HERE / "levels_on_ranks.py", "gloo"):
        assert done.returncode == 0, done.stderr
