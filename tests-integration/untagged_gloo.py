"""A line without tags or lengths, as NCCL is one, over gloo: what the untagged transport does is tested on a CPU."""

from __future__ import annotations

import torch
from communicators.waiters import WAIT, Waiters
from torch._C._distributed_c10d import ProcessGroupGloo

TAG = 0


class UntaggedGloo:
    """Every message has the same tag. One of another length than its receiver expects is an error (NCCL would hang).

    A lost connection is not noticed.
    """

    device_type = "cpu"
    summed = (torch.float32, torch.float64, torch.int32, torch.int64)

    def __init__(self, store, rank, size):
        self.group = ProcessGroupGloo(store, rank, size, WAIT)
        self.waiters = Waiters()
        self.waits = []
        self._asked = 0

    def ready(self, device):
        self._asked += 1
        return self._asked > 3

    def exchange(self, sends, recvs):
        return _Exchange(self, sends, recvs)

    def sum(self, tensor):
        return _Sum(self.wait_for([self.group.allreduce([tensor])]))

    def abort(self):
        for wait in self.waits:
            wait.give_up()

    def close(self):
        self.waiters.close(timeout=1.0)

    def wait_for(self, works):
        self.waits = [self.waiters.wait_for(work) for work in works]
        return self.waits

    def post(self, sends, recvs):
        works = [self.group.recv([buffer], peer, TAG) for peer, buffer in recvs.items()]
        return self.wait_for(works + [self.group.send([payload], peer, TAG) for peer, payload in sends.items()])


class _Sum:
    def __init__(self, waits):
        self._waits = waits

    def is_completed(self):
        return all(wait.done and wait.error is None for wait in self._waits)

    def wait(self):
        pass


class _Exchange(_Sum):
    """Lengths go first."""

    def __init__(self, line, sends, recvs):
        self._line, self._sends, self._recvs = line, sends, recvs
        self._lengths = {peer: torch.empty(1, dtype=torch.int64) for peer in recvs}
        self._given = {peer: torch.tensor([payload.numel()]) for peer, payload in sends.items()}
        self._in_second_half = False
        super().__init__(line.post(self._given, self._lengths))

    def is_completed(self):
        done = super().is_completed()
        if not done or self._in_second_half:
            return done
        for peer, length in self._lengths.items():
            assert length.item() == self._recvs[peer].numel(), f"rank {peer} sent {length.item()} bytes"
        self._in_second_half = True
        self._waits = self._line.post(self._sends, self._recvs)
        return False
