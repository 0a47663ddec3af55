"""First calls and the end of MPI's communicators, and of ranks, with requests that stand for MPI's."""

import time
from types import SimpleNamespace

import pytest
import torch
from ranks_on_threads import on_all, ranks

pytest.importorskip("mpi4py", reason="mpi4py is not installed")

from communicators import CollectiveError, allreduce
from communicators.background.transport import PeerLost
from communicators.worlds import mpi

pytestmark = pytest.mark.quick


class Request:
    """Done after so many looks."""

    def __init__(self, looks):
        self.looks = looks

    def Test(self):  # noqa: N802 (MPI names it)
        self.looks -= 1
        return self.looks < 0


class Freed:
    def __init__(self):
        self.freed = 0

    def Free(self):  # noqa: N802 (MPI names it)
        self.freed += 1


def transport(*, looks, abandoned):
    made = mpi.MPITransport.__new__(mpi.MPITransport)
    made._data, made._control = Freed(), Freed()
    made._written = [(Request(n), 1, b"departed") for n in looks]
    made._abandoned = list(abandoned)
    return made


@pytest.mark.parametrize("abandoned", [[], ["a round"]])
def test_what_was_written_is_sent_before_the_end(abandoned):
    """Also after a failed call. MPI's end would not send it, and a peer that waits for it would do so for ever."""
    ending = transport(looks=[3, 0, 20], abandoned=abandoned)
    requests = [request for request, *_ in ending._written]
    ending.close()
    assert all(request.looks < 0 for request in requests)
    assert (ending._data.freed, ending._control.freed) == ((0, 0) if abandoned else (1, 1))


def test_a_peer_that_never_reads_is_waited_for_once(monkeypatch):
    """However many communicators there are; one that is read from after all is closed as ever."""
    monkeypatch.setattr(mpi, "CLOSE_SECONDS", 0.05)
    first = transport(looks=[10**9], abandoned=[])
    first.close()
    assert not first._data.freed
    assert not first._control.freed
    second = transport(looks=[10], abandoned=[])
    second.close()
    assert second._written  # not waited for
    third = transport(looks=[0], abandoned=[])
    third.close()
    assert third._data.freed
    fourth = transport(looks=[3], abandoned=[])
    fourth.close()
    assert fourth._data.freed


class Failing:
    """What MPI says of a message to or from a process that was killed."""

    def Test(self, status=None):  # noqa: N802 (MPI names it)
        raise mpi.MPI.Exception(mpi.MPI.ERR_OTHER)


@pytest.mark.parametrize(("receives", "sends"), [({1: None, 2: Failing()}, {}), ({}, {1: None, 2: Failing()})])
def test_the_rank_whose_message_fails_is_named(receives, sends):
    pending = mpi._PendingRound(None, None, None, receives, sends, {}, {})
    with pytest.raises(PeerLost) as raised:
        pending.done()
    assert (raised.value.peer, raised.value.died) == (2, True)


def test_control_messages_to_a_dead_rank_are_dropped():
    ending = transport(looks=[0], abandoned=[])
    ending._written.append((Failing(), 2, b"departed"))
    assert not ending._unsent()


def test_who_is_absent_from_a_first_call_is_named():
    """Not this rank itself, whose own message may not have come either."""

    class Comm:
        Get_rank, Get_size = (lambda self: 1), (lambda self: 4)

        def Ialltoallv(self, sends, receives):  # noqa: N802 (MPI names it)
            receives[0][2] = 1
            return Request(10**9)

    with pytest.raises(CollectiveError, match=r"after 2 s: rank 1 waits for ranks \[0, 3\] in the first call"):
        mpi._wait_for_all(Comm(), time.monotonic(), 2.0)


def test_after_a_failure_it_says_how_to_go_on():
    """Once a call has raised the reason: that is the same on all ranks, and another rank may raise it yet."""
    comms = ranks(2)
    held = [SimpleNamespace(Get_attr=lambda key, comm=comm: comm) for comm in comms]
    assert mpi.from_mpi(held[0]) is comms[0]
    reasons = on_all(comms, lambda comm: allreduce(torch.ones(3 + comm.rank), comm, native=False))
    assert str(reasons[0]) == str(reasons[1])
    with pytest.raises(CollectiveError, match=r"ranks disagree on call 0.*; .* go on with another one, by Dup\(\) on"):
        mpi.from_mpi(held[0])
    comms[1].control.told = False
    assert mpi.from_mpi(held[1]) is comms[1]


class Receive:
    """A persistent receive of these messages, by source; notes what it is asked."""

    def __init__(self, room, messages):
        self.room, self.messages, self.asked = room, messages, []

    def __getattr__(self, name):
        return lambda: self.asked.append(name)

    def Test(self, status):  # noqa: N802 (MPI names it)
        if not self.messages or self.asked[-1] != "Start":
            return False
        source, message = self.messages.pop(0)
        self.room[: len(message)] = message
        status.Set_source(source)
        status.Set_elements(mpi.MPI.BYTE, len(message))
        self.asked.append("came")
        return True


def test_a_signal_line_reads_all_that_has_come_and_waits_until_mpi_touches_its_room_no_more():
    """A receive that is cancelled is over only after that."""
    messages = [(2, b"first"), (0, b"second, longer"), (2, b"")]
    made = lambda room, source: Receive(room[0], list(messages))  # noqa: E731
    line = mpi.MPISignalLine(SimpleNamespace(Recv_init=made), None)
    assert (line.received(), line.received()) == (messages, [])
    line.close()
    assert line._receive.asked == [*["Start", "came"] * 3, "Start", "Cancel", "Wait", "Free"]
