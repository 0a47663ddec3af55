"""Elastic laws under drawn schedules, for every kind of optimizer; `python -m bench elastic` draws more of them."""

import logging

import pytest
from communicators.elastic.testing import check_elastic_laws

from bench.elastic_trainings import KINDS, ByOptimizer

SCHEDULES = 12
ONCE_BROKEN = {
    "dense": [0, 21],  # unlike numbers of steps; steps with fewer than at_least before the first exchange
    "cocod": [100, 173],  # newcomers in finish(); ranks of which some wait for others to come
    "easgd": [33, 82],  # α of unlike numbers of ranks, and so anchors that differ
    "overlap-local-sgd": [35],  # an exchange that is begun again says something else than one that is begun then
    "eager": [25, 32],  # a dark link, for which nobody was left out; ranks that have gone on without each other
}


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore")
def test_laws(kind, caplog):
    caplog.set_level(logging.ERROR)
    for seed in {*range(SCHEDULES), *ONCE_BROKEN.get(kind, [])}:
        check_elastic_laws(seed, training=ByOptimizer(kind))
