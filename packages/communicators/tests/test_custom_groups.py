"""Process groups that are not torch's own: written in Python, of threads, fake ones."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from communicators import CollectiveError, SimulatedWorld, allreduce, as_communicator
from communicators.worlds.alone import Alone
from ranks_on_threads import on_all, soon

pytestmark = pytest.mark.quick


class Own(dist.ProcessGroup):
    """As those of libraries that survive the loss of ranks: its ranks may change, and it has no Store."""

    def __init__(self, rank, size):
        super().__init__(rank, size)
        self.now = rank, size

    def rank(self):
        return self.now[0]

    def size(self):
        return self.now[1]


def on_threads(groups, store):
    def sum_of(group):
        comm = as_communicator(group, store=store, timeout=30)
        total = allreduce(torch.full((3,), 1.0 + group.rank()), comm)
        return comm, total.tolist()

    with ThreadPoolExecutor(len(groups)) as threads:
        return list(threads.map(sum_of, groups))


def test_a_group_without_a_store_is_given_one():
    groups, store = [Own(rank, 2) for rank in range(2)], dist.HashStore()
    with pytest.raises(TypeError, match=r"a Own, has no Store .* as_communicator\(group, store=\.\.\.\)"):
        as_communicator(groups[0])
    first = on_threads(groups, store)
    assert [total for _, total in first] == [[3.0] * 3] * 2
    assert [as_communicator(group) for group in groups] == [comm for comm, _ in first]  # met once
    assert [comm for comm, _ in on_threads(groups, store)] == [comm for comm, _ in first]


def test_a_group_that_was_set_up_anew_is_met_anew():
    groups, store = [Own(rank, 3) for rank in range(3)], dist.HashStore()
    assert [total for _, total in on_threads(groups, store)] == [[6.0] * 3] * 3
    for rank, group in enumerate(groups[:2]):
        group.now = rank, 2
    with pytest.raises(TypeError, match="has no Store"):
        as_communicator(groups[0])
    assert [total for _, total in on_threads(groups[:2], dist.PrefixStore("again", store))] == [[3.0] * 3] * 2


class Reconfigurable(Own):
    """As torch's since 2.14, whose handle is new where it was set up anew."""

    supports_reconfigure, handle = True, "first"

    def get_reconfigure_handle(self):
        return self.handle


def test_a_group_that_was_set_up_anew_with_as_many_ranks_is_met_anew():
    groups, store = [Reconfigurable(rank, 2) for rank in range(2)], dist.HashStore()
    first = [comm for comm, _ in on_threads(groups, store)]
    assert [as_communicator(group) for group in groups] == first
    for group in groups:
        group.handle = "second"
    assert not {comm for comm, _ in on_threads(groups, store)} & set(first)


def test_ranks_that_met_others_before_meet_those_that_are_new():
    """In the same Store, where some ranks have been more often than others."""
    store = dist.HashStore()
    for size in (2, 4, 3):
        groups = [Own(rank, size) for rank in range(size)]
        assert [total for _, total in on_threads(groups, store)] == [[size * (size + 1) / 2.0] * 3] * size


@pytest.mark.slow
def test_a_communicator_that_has_failed_is_not_handed_out():
    """The ranks meet anew where all are there; a rank that is gone is said at once, with what to do."""
    groups, store = [Own(rank, 2) for rank in range(2)], dist.HashStore()
    failed = [comm for comm, _ in on_threads(groups, store)]
    reasons = [str(error) for error in on_all(failed, lambda comm: allreduce(torch.ones(3 + comm.rank), comm))]
    assert reasons[0].startswith("ranks disagree on call 1")
    assert len(set(reasons)) == 1
    made = [comm for comm, _ in on_threads(groups, store)]
    assert not set(made) & set(failed)
    assert [total for _, total in on_threads(groups, store)] == [[3.0] * 3] * 2
    made[1].transport.close()  # as the connection of a process that has died
    with pytest.raises(CollectiveError, match="rank 1 is gone: its connection was lost"):
        allreduce(torch.ones(3), made[0])
    with pytest.raises(CollectiveError, match=r"rank 1 is gone.* as_communicator\(group, store=\.\.\.\)"):
        as_communicator(groups[0])
    groups[1] = Own(1, 2)
    assert [total for _, total in on_threads(groups, store)] == [[3.0] * 3] * 2


@pytest.mark.slow
def test_a_rank_between_calls_is_told_before_the_ranks_meet_anew():
    """Else its next call would be summed with one that another rank made later."""
    groups, store = [Own(rank, 2) for rank in range(2)], dist.HashStore()
    failed = [comm for comm, _ in on_threads(groups, store)]

    def sum_of(rank, value, timeout=20):
        comm = as_communicator(groups[rank], store=store, timeout=timeout)
        return allreduce(torch.full((3,), value), comm).tolist()

    with pytest.raises(CollectiveError, match="timed out after 1 s") as first:
        sum_of(0, 1.0, timeout=1)
    assert soon(lambda: failed[1].control.abort_reason)  # while its caller computes
    with ThreadPoolExecutor(1) as thread:
        anew = thread.submit(sum_of, 0, 10.0)
        with pytest.raises(CollectiveError) as second:
            sum_of(1, 100.0)
        assert str(second.value) == str(first.value)
        assert sum_of(1, 1000.0) == anew.result() == [1010.0] * 3


def test_a_store_for_what_needs_none_is_refused():
    comm = SimulatedWorld(1).run(lambda comm: comm)[0]
    for given in (comm, Alone()):
        with pytest.raises(TypeError, match="store= is for a torch process group"):
            as_communicator(given, store=dist.HashStore())
    with pytest.raises(TypeError, match=r"store is str, expected a torch\.distributed\.Store"):
        as_communicator(Own(0, 2), store="tcp://there")


class Wrapping(dist.ProcessGroup):
    """As torchft's: made as one rank of one, it learns of others later, and has a size of its own but no rank."""

    def __init__(self):
        super().__init__(0, 1)

    def size(self):
        return 2


def test_a_group_that_does_not_know_its_rank_is_refused():
    for store in (None, dist.HashStore()):
        with pytest.raises(TypeError, match=r"a Wrapping says how many .* as_communicator\(group\.parent\)"):
            as_communicator(Wrapping(), store=store)


FAKE = """
import sys
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from communicators import as_communicator
kept = FakeStore()
store = {"as it is": kept, "behind prefixes": dist.PrefixStore("a", dist.PrefixStore("b", kept))}[sys.argv[1]]
if sys.argv[2] == "let go":
    del kept
dist.init_process_group("fake", store=store, rank=0, world_size=2)
del store
for given in (None, FakeStore()):
    try:
        as_communicator(store=given)
    except TypeError as error:
        print(error)
"""


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("store", ["as it is", "behind prefixes"])
@pytest.mark.parametrize("python", ["keeps it", "let go"])
def test_a_fake_group_is_refused(store, python):
    command = [sys.executable, "-W", "ignore", "-c", FAKE, store, python]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.count("as that of a fake process group") == 2, done.stderr
