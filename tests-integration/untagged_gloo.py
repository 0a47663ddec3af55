"""A line without tags or lengths, as NCCL is one, over gloo: so the untagged transport is tested without GPUs."""

from __future__ import annotations

from contextlib import suppress

import torch
from communicators.background.transport_communicator import TransportCommunicator
from communicators.worlds.gloo_group import GIVE_UP, WAIT, Wait, Waiters
from communicators.worlds.meeting import Rendezvous, store_of
from communicators.worlds.nccl import UntaggedTransport
from torch._C._distributed_c10d import ProcessGroupGloo

TAG = 0


def untagged_communicator(group, device_type="cpu"):
    """Of the ranks of a process group; what depends on data goes by the group itself."""

    def line(met):
        return UntaggedGloo(met.elsewhere("line").shared, met.rank, met.size, device_type)

    return TransportCommunicator(UntaggedTransport(Rendezvous.of(group, store_of(group)), line))


class UntaggedGloo:
    """Every message has the same tag. One of another length than its receiver expects is an error (NCCL would hang).

    A lost connection is not noticed. Payloads on another device than the CPU go by host memory.
    """

    summed = (torch.float32, torch.float64, torch.int32, torch.int64)

    def __init__(self, store, rank, size, device_type="cpu"):
        self.device_type = device_type
        self.group = ProcessGroupGloo(store, rank, size, WAIT)
        self.waiters = Waiters()
        self.waits = []
        self._asked = 0

    def ready(self, device):
        self._asked += 1
        return self._asked > 3

    def sendrecv(self, sends, recvs):
        return _SendRecv(self, sends, recvs)

    def sum(self, tensor):
        host = tensor.cpu()
        return _Sum(self.wait_for([self.group.allreduce([host])]), {tensor: host})

    def abort(self):
        for work in [wait.work for wait in self.waits if wait.work is not None]:
            with suppress(RuntimeError):  # in vain: that closes the connection
                work.wait(GIVE_UP)

    def close(self):
        self.waiters.close(timeout=1.0)

    def wait_for(self, works):
        self.waits = [self.waiters.begin(Wait(work)) for work in works]
        return self.waits

    def post(self, sends, recvs):
        try:
            works = [self.group.recv([buffer], peer, TAG) for peer, buffer in recvs.items()]
            works += [self.group.send([payload], peer, TAG) for peer, payload in sends.items()]
        except RuntimeError:  # gloo's, of a connection that was lost before
            self.waits = [_Never()]
            return self.waits
        return self.wait_for(works)


class _Never:
    """What NCCL would wait for without end."""

    done, error, work = False, None, None


class _Sum:
    def __init__(self, waits, hosts):
        self._waits, self._hosts = waits, hosts

    def is_completed(self):
        return all(wait.done and wait.error is None for wait in self._waits)

    def wait(self):
        for tensor, host in self._hosts.items():
            tensor.copy_(host)


class _SendRecv(_Sum):
    """Lengths go first."""

    def __init__(self, line, sends, recvs):
        self._line = line
        self._sends = {peer: payload.cpu() for peer, payload in sends.items()}
        self._recvs = {peer: torch.empty_like(buffer, device="cpu") for peer, buffer in recvs.items()}
        self._lengths = {peer: torch.empty(1, dtype=torch.int64) for peer in recvs}
        self._given = {peer: torch.tensor([payload.numel()]) for peer, payload in sends.items()}
        self._in_second_half = False
        super().__init__(line.post(self._given, self._lengths), {recvs[peer]: self._recvs[peer] for peer in recvs})

    def is_completed(self):
        done = super().is_completed()
        if not done or self._in_second_half:
            return done
        for peer, length in self._lengths.items():
            assert length.item() == self._recvs[peer].numel(), f"rank {peer} sent {length.item()} bytes"
        self._in_second_half = True
        self._waits = self._line.post(self._sends, self._recvs)
        return False
