"""How ranks meet in a Store: whoever was there before, those that meet are the ones that are there."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from communicators import CollectiveError
from communicators.worlds.meeting import job_of, meet
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.quick


def met(store, ranks, size, timeout=20.0):
    """What each of these ranks of so many is told."""
    with ThreadPoolExecutor(len(ranks)) as threads:
        meeting = [threads.submit(meet, store, rank, size, timeout) for rank in ranks]
        return [one.exception() or one.result() for one in meeting]


def died(store, rank, names):
    """A rank that had come, and had maybe read what others wrote, and was not heard of again."""
    store.set(f"here/{rank}", f"word-{rank} {names[-1] if names else ''}")


@given(data=st.data(), sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_those_that_are_there_meet_whatever_the_store_holds(data, sizes):
    store, names = dist.HashStore(), []
    for size in sizes:
        for rank in data.draw(st.sets(st.integers(0, 4))):
            died(store, rank, names)
        told = set(met(store, range(size), size))
        assert len(told) == 1
        names += told
    assert len(set(names)) == len(sizes)


@pytest.mark.parametrize("before", [0, 3])
def test_who_is_gone_is_named_by_all(before):
    """Though an earlier rank of that number has met in the same Store."""
    store = dist.HashStore()
    if before:
        met(store, range(before), before)
    for rank, error in zip((0, 2), met(store, [0, 2], 3, timeout=0.5), strict=True):
        assert isinstance(error, CollectiveError)
        assert f"rank {rank} waits for ranks [1]" in str(error)
        assert "as_communicator(group, store=...)" in str(error)
    assert len(set(met(store, range(3), 3))) == 1  # those that gave up are not taken for there, and may come again


def meeting_of_jobs(jobs):
    """What ranks of these jobs are told."""
    store = dist.HashStore()
    with ThreadPoolExecutor(len(jobs)) as threads:
        ranks = [threads.submit(meet, store, rank, len(jobs), 10.0, job) for rank, job in enumerate(jobs)]
        return [one.exception() or one.result() for one in ranks]


def test_two_jobs_that_have_met_are_told_on_every_rank():
    name = "TORCHELASTIC_RUN_ID"
    told = meeting_of_jobs([f"{name}=7", f"{name}=7", f"{name}=8"])
    assert len({str(error) for error in told}) == 1
    assert f"rank 0 is of the job {name}=7, rank 2 of {name}=8: two jobs have met at one" in str(told[0])
    assert "MASTER_PORT of its own" in str(told[0])


def test_jobs_of_a_scheduler_may_belong_together(caplog):
    assert len(set(meeting_of_jobs(["SLURM_JOB_ID=7", "SLURM_JOB_ID=8"]))) == 1
    assert "rank 0 is of the job SLURM_JOB_ID=7, rank 1 of SLURM_JOB_ID=8" in caplog.text


@pytest.mark.parametrize("jobs", [["A=1", "A=1"], ["", "A=1"], ["A=1", ""], ["A=1", "B=2"], ["", ""]])
def test_ranks_that_may_be_of_one_job_meet(jobs):
    assert len(set(meeting_of_jobs(jobs))) == 1


def test_words_of_an_earlier_job_do_not_count():
    store = dist.HashStore()
    store.set("here/1", "word/SLURM_JOB_ID=6 name")
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(meet, store, 0, 2, 10.0, "SLURM_JOB_ID=7")
        time.sleep(0.2)
        second = threads.submit(meet, store, 1, 2, 10.0, "SLURM_JOB_ID=7")
        assert first.result() == second.result()


def test_a_rank_whose_place_another_job_has_taken():
    """Rank 0 has met that other rank 1, and goes on."""
    store = dist.HashStore()
    met(store, range(2), 2)
    [error] = met(store, [1], 2, timeout=0.5)
    assert "rank 1 waits for ranks [0]" in str(error)
    assert "(ranks [0] have met another rank 1 there: give each job a MASTER_PORT of its own)" in str(error)


@pytest.mark.parametrize(
    ("environ", "job"),
    [
        ({}, ""),
        ({"SLURM_JOB_ID": "7"}, "SLURM_JOB_ID=7"),
        ({"SLURM_JOB_ID": "7", "SLURM_HET_SIZE": "2"}, ""),
        ({"TORCHELASTIC_RUN_ID": "none", "PBS_JOBID": "9.head"}, "PBS_JOBID=9.head"),
        ({"TORCHELASTIC_RUN_ID": "my run", "SLURM_JOB_ID": "7"}, "TORCHELASTIC_RUN_ID=my_run"),
    ],
)
def test_what_tells_a_job(environ, job):
    assert job_of(environ) == job
