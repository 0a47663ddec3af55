"""stats(): what training has cost and saved; and what a repr says."""

import json
import math
from functools import partial

import pytest
import torch
from communicators import Dies, Elastic, Link, SimulatedWorld
from local_sgd import CoCoDSGD, DiLoCo, LocalSGD, OverlapLocalSGD, StreamingDiLoCo
from partial_collectives import PartialAllreduce
from sparse_collectives import sparse_allreduce
from sparse_compress import ErrorFeedback, TopK

pytestmark = pytest.mark.quick

NUMEL, TAU = 11, 4


def made(comm, task, algorithm, **options):
    return algorithm(torch.optim.SGD(task.model.parameters(), lr=0.1), comm=comm, sync_every=TAU, **options)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_is_sent_and_what_whole_gradients_would_have_been(quadratic, algorithm, size):
    def body(comm):
        task = quadratic(comm.rank)
        optimizer = made(comm, task, algorithm)
        before = comm.bytes_sent - optimizer.stats()["bytes_sent"]  # some agree on more when they are made
        task.train(optimizer, range(2 * TAU))
        stats = optimizer.stats()
        task.train(optimizer, range(2 * TAU, 3 * TAU))
        optimizer.finish()
        return stats, optimizer.stats(), comm.bytes_sent - before

    for early, late, sent in SimulatedWorld(size).run(body):
        assert (early["steps"], late["steps"]) == (2 * TAU, 3 * TAU)
        assert early["boundaries"] >= 2
        assert late["bytes_sent"] == sent >= early["bytes_sent"]
        assert late["bytes_dense"] == 3 * TAU * (2 * 4 * NUMEL * (size - 1) // size)
        assert late["seconds_exchanging"] >= late["seconds_waited"] >= 0
        assert json.loads(json.dumps(late)) == late


@pytest.mark.parametrize(("algorithm", "hidden"), [(LocalSGD, 0.0), (CoCoDSGD, 0.5)])
def test_seconds_are_those_of_the_hidden_fraction(quadratic, algorithm, hidden):
    def body(comm):
        task = quadratic(comm.rank)
        optimizer = made(comm, task, algorithm)
        for step in range(5 * TAU):
            comm.elapse(1e-3)
            task.train(optimizer, [step])
        return optimizer.stats(), optimizer.hidden_fraction

    stats, fraction = SimulatedWorld(2, Link(8e-3, 0.0)).run(body)[0]  # a message takes 8 ms, a block 4
    assert stats["seconds_hidden"] == pytest.approx(fraction * stats["seconds_exchanging"])
    assert fraction == pytest.approx(hidden, abs=0.01)


def test_a_sum_by_the_transport_itself_is_waited_for_where_it_begins(quadratic):
    def body(comm):
        task = quadratic(comm.rank)
        optimizer = made(comm, task, LocalSGD, native=True)
        for step in range(5 * TAU):
            comm.elapse(1e-3)
            task.train(optimizer, [step])
        return optimizer.stats(), optimizer.hidden_fraction

    stats, fraction = SimulatedWorld(2, Link(4e-3, 0.0)).run(body)[0]
    assert stats["seconds_waited"] == pytest.approx(stats["seconds_exchanging"])
    assert (stats["seconds_hidden"], fraction) == (pytest.approx(0), pytest.approx(0))
    assert stats["seconds_waited"] > 0


def test_who_waits_has_all_that_is_under_way(quadratic):
    """An exchange that takes longer than the rest of the training: without `wait()` it is not counted."""

    def body(comm, waits):
        task = quadratic(comm.rank)
        optimizer = made(comm, task, OverlapLocalSGD)
        task.train(optimizer, range(TAU))
        if waits:
            optimizer.wait()
        return optimizer.stats()["seconds_exchanging"], optimizer.stats()["seconds_waited"]

    counted, not_yet = (SimulatedWorld(2, Link(2.0, 0.0)).run(partial(body, waits=waits)) for waits in (True, False))
    assert counted == [(pytest.approx(2.0), pytest.approx(2.0))] * 2
    assert not_yet == [(0.0, 0.0)] * 2


def test_steps_of_before_a_resume_are_not_what_is_compared_with(quadratic):
    def body(comm):
        task = quadratic(comm.rank)
        optimizer = made(comm, task, LocalSGD)
        task.train(optimizer, range(2 * TAU))
        other = made(comm, task, LocalSGD)
        other.load_state_dict(optimizer.state_dict())
        task.train(other, range(2 * TAU, 3 * TAU))
        return other.stats()

    stats = SimulatedWorld(2).run(body)[0]
    assert (stats["steps"], stats["bytes_dense"]) == (3 * TAU, TAU * 4 * NUMEL)


def test_what_whole_gradients_would_have_been_is_by_the_ranks_of_each_step(quadratic):
    """Not by those that are left: the number would shrink, which counts as begun anew in monitoring."""

    def body(comm):
        task, found = quadratic(comm.rank), []
        optimizer = made(Elastic(comm, start_with=2), task, LocalSGD)
        for step in range(4 * TAU):
            comm.elapse(0.1)
            task.train(optimizer, [step])
            found.append(optimizer.stats())
        return found

    history, dead = SimulatedWorld(2, faults=[Dies(1, at=(TAU + 1.5) * 0.1)]).run(body)
    assert dead is None
    together = [stats["steps"] for stats in history if stats["ranks"] == 2][-1]
    assert TAU < together < 4 * TAU
    assert [stats["bytes_dense"] for stats in history] == [
        min(step + 1, together) * 4 * NUMEL for step in range(4 * TAU)
    ]


def test_a_repr_says_the_settings(quadratic):
    def body(comm):
        return repr(made(comm, quadratic(comm.rank), CoCoDSGD, weighted=True))

    text = SimulatedWorld(2).run(body)[0]
    assert text.startswith("CoCoDSGD(sync_every=4, buffers='keep', inner_state='keep', weighted=True, rank 0 of 2, SGD")


@pytest.mark.parametrize("compress", [None, "int4", "sparse"])
def test_residuals_of_a_compressed_average_have_a_norm(quadratic, compress):
    def body(comm):
        task = quadratic(comm.rank)
        sparse = {"compress": ErrorFeedback(TopK(0.2)), "allreduce": partial(sparse_allreduce, k=3)}
        options = sparse if compress == "sparse" else {"compress": compress} if compress else {}
        optimizer = made(comm, task, LocalSGD, **options)
        task.train(optimizer, range(2 * TAU))
        held = optimizer.state_dict()["distributed"].get("residuals", {"parts": {}})["parts"]
        held = held.get("sparsifier", {"residuals": held})["residuals"]
        norm = math.sqrt(sum(float(one.double().square().sum()) for one in held.values()))
        return optimizer.stats(), norm

    for stats, norm in SimulatedWorld(2).run(body):
        assert stats.get("residual_norm", 0.0) == pytest.approx(norm)
        assert (norm > 0) == (compress is not None)


@pytest.mark.parametrize("kind", [DiLoCo, StreamingDiLoCo])
def test_rounds_that_do_not_wait_tell_their_seconds_and_who_is_late(quadratic, kind):
    def body(comm):
        task = quadratic(comm.rank)
        optimizer = made(comm, task, kind, allreduce=partial(PartialAllreduce, quorum=2))
        before = comm.bytes_sent - optimizer.stats()["bytes_sent"]
        for step in range(4 * TAU):
            comm.elapse(1e-2 * comm.rank)
            task.train(optimizer, [step])
        optimizer.finish()
        return optimizer.stats(), comm.bytes_sent - before

    early, late = SimulatedWorld(2, Link(1e-3, 0.0)).run(body)
    for stats, sent in (early, late):
        assert (stats["steps"], stats["bytes_sent"]) == (4 * TAU, sent)
        assert stats["late_seconds_of_1"] > stats["late_seconds_of_0"]
        assert stats["seconds_exchanging"] >= stats["seconds_waited"] > 0
    assert early[0]["seconds_waited"] > late[0]["seconds_waited"]
