"""How NCCL is driven, as far as it can be seen without it: the calls that a process group gets, and their order."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from communicators import Round
from communicators.worlds import nccl
from communicators.worlds.meeting import Rendezvous
from torch._C import _distributed_c10d

pytestmark = pytest.mark.quick

HERE, ELSEWHERE = torch.device("cpu"), torch.device("meta")


class Options:
    _timeout = None


class Group:
    """In place of ProcessGroupNCCL: notes what it is asked."""

    Options = Options

    def __init__(self, store, rank, size, options):
        self.timeout, self.asked, self.others_are_there = options._timeout, [], threading.Event()
        self.made_of = store, rank, size

    def _start_coalescing(self):
        self.asked.append("start")

    def _end_coalescing(self):
        self.asked.append("end")
        return self

    def send(self, tensors, peer, tag):
        if peer == 13:
            raise ValueError("no such rank")
        self.asked.append(("send", peer))

    def recv(self, tensors, peer, tag):
        self.asked.append(("recv", peer))

    def allreduce(self, tensors):
        self.asked.append("sum")
        return self

    def is_completed(self):
        return self.others_are_there.is_set()

    def wait(self):
        self.asked.append("wait")

    def abort(self):
        self.asked.append("abort")


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch was built without NCCL")
def test_torch_has_what_the_stand_in_has():
    real = _distributed_c10d.ProcessGroupNCCL
    asked = {name for name in vars(Group) if not name.startswith("__")} - {"is_completed", "wait"}  # a work's
    assert asked <= set(dir(real))
    assert hasattr(real.Options(), "_timeout")
    assert {"is_completed", "wait"} <= set(dir(_distributed_c10d.Work))
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="no GPUs found"):
            nccl.NCCL(dist.HashStore(), 0, 1)


@pytest.fixture
def line(monkeypatch):
    monkeypatch.setattr(_distributed_c10d, "ProcessGroupNCCL", Group, raising=False)
    return nccl.NCCL(None, 0, 3)


def connect(line):
    line._group.others_are_there.set()
    end = time.monotonic() + 5.0
    while not line.ready(HERE):
        assert time.monotonic() < end
        time.sleep(1e-3)


def test_it_is_of_those_who_have_met(monkeypatch):
    monkeypatch.setattr(_distributed_c10d, "ProcessGroupNCCL", Group, raising=False)
    kept = dist.HashStore()
    made = [nccl.NCCL.of(Rendezvous(rank, 3, kept, kept))._group.made_of for rank in (1, 2)]
    assert [ranks for _, *ranks in made] == [[1, 3], [2, 3]]
    made[0][0].set("key", "value")
    assert made[1][0].check(["key"])
    assert not kept.check(["key"])  # nor where other keys of theirs are


def test_its_watchdog_ends_nothing(line):
    assert line._group.timeout.total_seconds() >= 24 * 3600


def test_it_connects_all_ranks_by_one_sum_and_does_not_block(line):
    assert not line.ready(HERE)
    assert not line.ready(HERE)
    connect(line)
    assert line._group.asked == ["sum", "wait"]
    with pytest.raises(ValueError, match="one GPU a rank"):
        line.ready(ELSEWHERE)


def test_a_rank_that_cannot_connect_says_why(line):
    line._group.is_completed = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        connect(line)


def test_a_round_is_one_group(line):
    x = torch.ones(3)
    assert line.sendrecv({1: x, 2: x}, {2: x}) is line._group
    assert line._group.asked == ["start", ("recv", 2), ("send", 1), ("send", 2), "end"]


def test_a_group_is_closed_whatever_happens(line):
    with pytest.raises(ValueError, match="no such rank"):
        line.sendrecv({13: torch.ones(3)}, {})
    assert line._group.asked == ["start", "end"]


def test_a_round_that_is_given_up_ends_the_line_once_it_was_launched():
    aborted = []
    transport = SimpleNamespace(
        line=SimpleNamespace(ready=lambda device: True, sendrecv=lambda sends, recvs: "launched"),
        has_turn=lambda call: True,
        is_over=lambda launched: False,
        abort=lambda *launched: aborted.append(launched[0]),
    )
    pending = nccl._PendingRound(transport, None, Round(), HERE)
    pending.cancel()
    assert not aborted
    pending.done()
    pending.cancel()
    assert aborted == ["launched"]


def test_it_is_aborted_once(line):
    line.abort()
    line.close()
    assert line._group.asked == ["abort"]
