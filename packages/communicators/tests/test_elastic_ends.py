"""Ranks of an `Elastic` that come through the last commit and close, while a death stops the others in it."""

import gc
import inspect
import logging
import math
import os
import re
import subprocess
import sys
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from communicators import BoardLost, CollectiveError, Dies, Elastic, SimulatedWorld, allreduce
from communicators.elastic import __main__ as serving

TIMES = 60


def steps_of(comm, world, steps):
    totals = {}
    for step in range(steps):
        comm.elapse(1e-5)
        totals[step] = world.atomic(lambda step=step: allreduce(torch.tensor([1.0 + step]), world))
        world.boundary(lambda: {"totals": totals})
    world.close()
    return totals


@pytest.mark.few(2)
@pytest.mark.parametrize("dead", range(5))
def test_who_closes_after_the_last_commit_has_what_the_others_have(dead, caplog):
    caplog.set_level(logging.ERROR)
    for number in range(TIMES):
        faults = [Dies(dead, at=5.4e-3 + 1.2e-3 * number / TIMES)]
        world = SimulatedWorld(5, faults=faults, jitter=2e-5, seed=number)
        ends = [result for result in world.run(lambda comm: steps_of(comm, Elastic(comm), 2)) if result is not None]
        assert all(end == ends[0] for end in ends)


@pytest.mark.quick
def test_who_has_left_or_comes_late_is_told_so():
    """A rank that leaves, one that goes on, and one that is stopped until the training has ended."""

    def body(comm):
        world = Elastic(comm, start_with=3, timeout=0.2)
        world.atomic(lambda: allreduce(torch.ones(1), world))
        if comm.rank == 0:
            world.leave()
        world.atomic(lambda: allreduce(torch.ones(1), world))
        world.boundary(dict)
        if comm.rank == 1:
            world.atomic(lambda: allreduce(torch.ones(1), world))
            world.close()
            return None
        comm.elapse(5.0 * comm.rank)
        with pytest.raises(CollectiveError) as told:
            world.atomic(lambda: allreduce(torch.ones(1), world))
        return str(told.value)

    leaver, _, late = SimulatedWorld(3).run(body)
    assert leaver.startswith("this rank has left, as leave() asks: where leaving is True, end a loop over")
    assert "was left out of generation 4 with which the training has ended" in late


def summed(meeting, **settings):
    """One step in a world that a function makes and drops."""
    world = Elastic(meeting, **settings)
    world.atomic(lambda: allreduce(torch.ones(1), world))
    return world.generation


@pytest.mark.quick
@pytest.mark.timeout(60)
def test_who_comes_after_simulated_ranks_have_returned_begins_anew():
    def body(comm):
        comm.elapse(comm.rank)
        return summed(comm, patience=20.0)

    assert SimulatedWorld(3).run(body) == [1, 3, 5]  # 2 and 4 are the ends


@pytest.mark.quick
def test_a_simulated_rank_ends_without_the_board():
    def body(comm):
        summed(comm)
        comm.elapse(2.0)

    world = SimulatedWorld(1, faults=[BoardLost(at=1.0, seconds=math.inf)])
    world.run(body)
    assert 2.0 < world.elapsed < 3.0


ONE_STEP = f"""
import gc, sys, torch
from communicators import Elastic, allreduce

{inspect.getsource(summed)}

print("generation", summed(sys.argv[1], at_least=2, patience=20), flush=True)
gc.collect()
sys.stdin.readline()
"""


@pytest.fixture
def start():
    started = []

    def one(*command):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        started.append(subprocess.Popen([sys.executable, *command], **pipes, text=True))
        return started[-1]

    yield one
    for process in started:
        process.kill()
        process.communicate()


def served(start):
    server = start("-m", "communicators.elastic", "--port", "0")
    return server, f"localhost:{re.search('port ([0-9]+)', server.stdout.readline())[1]}"


@pytest.mark.few(0)
def test_a_training_that_ended_lets_another_one_begin(start):
    """Also where its world was a variable of a function: the record of ranks that are gone would keep others out."""
    _, address = served(start)
    for generation in (1, 3):  # 2 is the end
        ranks = [start("-c", ONE_STEP, address) for _ in range(2)]
        for rank in ranks:
            assert rank.communicate("\n", timeout=60)[0] == f"generation {generation}\n"


def test_a_rank_that_has_gone_keeps_no_connection(start):
    _, address = served(start)
    boards = []
    for _ in range(3):
        world = Elastic(address)
        world.atomic(lambda world=world: allreduce(torch.ones(1), world))
        world._board.waiting()  # from now on a thread looks
        boards.append(weakref.ref(world._board))
        world.close()
        del world
    end = time.monotonic() + 10.0
    while any(board() for board in boards) and time.monotonic() < end:
        time.sleep(0.05)
        gc.collect()
    assert not any(board() for board in boards)


def test_who_gives_up_waiting_looks_no_longer_and_may_try_again(start):
    _, address = served(start)
    world = Elastic(address, at_least=2, patience=1.0)
    with pytest.raises(TimeoutError, match="waits for others"):
        world.size  # noqa: B018 - enters
    world._board._watch.join(10.0)
    assert not world._board._watch.is_alive()
    world._patience, other = 60.0, Elastic(address, at_least=2, patience=60.0)
    with ThreadPoolExecutor() as pool:
        assert list(pool.map(lambda one: one.size, [world, other])) == [2, 2]
    world.close()
    other.close()


GIVES_UP = """
import sys, threading, time
from communicators import Elastic
from communicators.elastic import store

read = store.names_in_line

def slowly(text):
    if threading.current_thread() is not threading.main_thread():
        time.sleep(1.0)
        print("has looked", flush=True)
    return read(text)

store.names_in_line = slowly
Elastic(sys.argv[1], at_least=2, patience=1.0).size
"""


def test_a_process_that_gives_up_waiting_ends_after_its_thread(start):
    """A thread amid a call of the Store's would abort it."""
    _, address = served(start)
    rank = start("-c", GIVES_UP, address)
    assert rank.communicate(timeout=60)[0].startswith("has looked")
    assert rank.returncode == 1


def test_a_process_ends_without_the_meeting_place(start):
    server, address = served(start)
    ranks = [start("-c", ONE_STEP, address) for _ in range(2)]
    assert [rank.stdout.readline() for rank in ranks] == ["generation 1\n"] * 2
    server.kill()
    server.wait()
    for rank in ranks:
        rank.communicate("\n", timeout=20)
        assert rank.returncode == 0


@pytest.mark.quick
def test_the_meeting_place_does_not_wait_long_for_names(monkeypatch):
    monkeypatch.delenv("RES_OPTIONS", raising=False)

    def store(*_, **__):
        assert "timeout:1" in os.environ["RES_OPTIONS"]
        raise RuntimeError("no port")

    monkeypatch.setattr(serving, "TCPStore", store)
    with pytest.raises(SystemExit):
        serving.main(["--port", "0"])
