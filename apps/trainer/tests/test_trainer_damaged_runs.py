"""Damaged and exchanged run folders: of every kind one, for runs of each sort (all: see `damaged_runs`)."""

import os
from collections.abc import Iterator

import pytest
from damaged_runs import GROUPS, RUNS, Campaign, begun, sampled


@pytest.fixture(scope="module", params=RUNS, ids=lambda run: f"{run[0]} on {run[1]}")
def campaign(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Campaign]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # nobody cuts the power here
        yield begun(*request.param, tmp_path_factory.mktemp("campaign"))


@pytest.mark.few(2)
@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.__name__)
def test_resumed_to_the_same_bits_or_refused_in_one_line(campaign: Campaign, group) -> None:
    campaign.tried, campaign.refused, campaign.faults = 0, 0, {}
    for case in sampled(group(campaign), (campaign.options.algorithm, campaign.ranks)):
        campaign.attempt(case)
    print(campaign.summary)
    assert campaign.tried > 0
    assert campaign.faults == {}
