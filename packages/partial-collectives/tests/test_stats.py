"""stats() of rounds and of eager SGD: bytes, seconds, lateness, residuals."""

import json
import math

import pytest
import torch
from communicators import Dies, Elastic, Link, SimulatedWorld, barrier
from hypothesis import given
from hypothesis import strategies as st
from partial_collectives import EagerSGD, PartialAllreduce
from ranks_on_threads import on_all, ranks

pytestmark = pytest.mark.quick

NUMEL = 40


def trained(comm, steps, seconds=0.0, **settings):
    torch.manual_seed(0)
    model = torch.nn.Linear(NUMEL - 1, 1)
    before = comm.bytes_sent
    optimizer = EagerSGD(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), comm=comm, **settings)
    made, found = comm.bytes_sent - before, []
    with optimizer:
        for _ in range(steps):
            comm.elapse(seconds)
            optimizer.zero_grad()
            model(torch.ones(2, NUMEL - 1)).sum().backward()
            optimizer.step()
            found.append(optimizer.stats())
    return [*found, optimizer.stats()], comm.bytes_sent - before - made


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.sampled_from(["solo", "majority", 1]))
def test_numbers_only_grow_and_bytes_are_the_communicators(steps, quorum):
    def body(comm):
        return trained(comm, steps[comm.rank], 1e-3 * comm.rank, quorum=quorum)

    size = len(steps)
    for rank, (history, sent) in enumerate(SimulatedWorld(size).run(body)):
        last = history[-1]
        assert last["bytes_sent"] == sent
        assert last["steps"] == steps[rank]
        assert last["gradients"] == sum(steps)
        assert last["bytes_dense"] == steps[rank] * (2 * 4 * NUMEL * (size - 1) // size)
        assert (last["rank"], last["ranks"]) == (rank, size)
        assert json.loads(json.dumps(last)) == last
        for name in ("steps", "rounds", "gradients", "bytes_sent", "bytes_dense", "seconds_exchanging"):
            values = [stats[name] for stats in history]
            assert values == sorted(values)
        for stats in history:
            assert 0 <= stats["seconds_waited"] <= stats["seconds_exchanging"] + 1e-12
            assert stats["seconds_hidden"] == pytest.approx(stats["seconds_exchanging"] - stats["seconds_waited"])


def test_dense_bytes_are_by_the_ranks_of_each_step():
    def body(comm):
        return trained(Elastic(comm, start_with=2), 6, 0.1)[0]

    history, dead = SimulatedWorld(2, faults=[Dies(1, at=0.25)]).run(body)
    assert dead is None
    assert history[-1]["ranks"] == 1
    dense = [stats["bytes_dense"] for stats in history]
    assert dense == sorted(dense)
    assert dense[-1] >= 2 * 4 * NUMEL


def test_seconds_are_waited_by_who_is_early_and_lateness_tells_for_whom():
    def body(comm):
        return trained(comm, 6, 2.0 if comm.rank == 1 else 0.1, quorum=3)[0][-2]

    ranks = SimulatedWorld(3, link=Link(alpha=1e-3, beta=0.0)).run(body)
    assert ranks[0]["seconds_waited"] == pytest.approx(ranks[2]["seconds_waited"], abs=0.5)
    assert ranks[0]["seconds_waited"] > 10 > 1 > ranks[1]["seconds_waited"]
    for stats in ranks:
        late = [stats[f"late_seconds_of_{rank}"] for rank in range(3)]
        assert late.index(max(late)) == 1
        assert late[1] - late[0] == pytest.approx(1.9, abs=0.1)


def test_rounds_under_way_while_this_rank_computes_are_hidden():
    def body(comm):
        with PartialAllreduce(torch.zeros(NUMEL), comm, quorum=2) as partial:
            partial.give(torch.ones(NUMEL))
            comm.elapse(60.0)
            partial.take()
            return partial.stats()

    for stats in SimulatedWorld(2, link=Link(alpha=1.0, beta=0.0)).run(body):
        assert stats["seconds_waited"] < 1.0 < stats["seconds_hidden"] < 60.0


def test_bytes_count_from_when_it_is_made():
    def body(comm):
        with PartialAllreduce(torch.zeros(NUMEL), comm) as partial:
            sent = partial.stats()["bytes_sent"]
            barrier(comm)  # nobody leaves, for which others send, before all have looked
            return sent

    assert on_all(ranks(2), body) == [0, 0]  # not the barriers by which its communicators are made


@pytest.mark.parametrize("compress", [None, "int4"])
def test_the_residuals_of_rounding_have_a_norm(compress):
    def body(comm):
        with PartialAllreduce(torch.zeros(NUMEL), comm, quorum=comm.size, compress=compress) as partial:
            partial.allreduce(torch.linspace(-1, comm.rank, NUMEL))
            norms = [float(one.norm()) for each in partial.residuals for one in each]
            return partial.stats().get("residual_norm"), norms

    for norm, norms in SimulatedWorld(2).run(body):
        assert (norm is None) == (compress is None)
        if norm is not None:
            assert norm == pytest.approx(math.hypot(*norms)) != 0
