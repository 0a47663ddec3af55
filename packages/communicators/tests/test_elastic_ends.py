"""Ranks of an `Elastic` that come through the last commit and close, while a death stops the others in it."""

import logging

import pytest
import torch
from communicators import Dies, Elastic, SimulatedWorld, allreduce

TIMES = 60


def steps_of(comm, world, steps):
    totals = {}
    for step in range(steps):
        comm.elapse(1e-5)
        totals[step] = world.atomic(lambda step=step: allreduce(torch.tensor([1.0 + step]), world))
        world.boundary(lambda: {"totals": totals})
    world.close()
    return totals


@pytest.mark.parametrize("dead", range(5))
def test_who_closes_after_the_last_commit_has_what_the_others_have(dead, caplog):
    caplog.set_level(logging.ERROR)
    for number in range(TIMES):
        faults = [Dies(dead, at=5.4e-3 + 1.2e-3 * number / TIMES)]
        world = SimulatedWorld(5, faults=faults, jitter=2e-5, seed=number)
        ends = [result for result in world.run(lambda comm: steps_of(comm, Elastic(comm), 2)) if result is not None]
        assert all(end == ends[0] for end in ends)
