"""Letters by gloo, beside the data: a receive from whoever writes is always posted."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from communicators.call import TAG_BITS
from communicators.control import LETTER_BYTES
from communicators.waiters import Wait, Waiters

LETTER_TAG = (1 << TAG_BITS) + 1
LENGTH_BYTES = 4
FLUSH_POLL_SECONDS = 1e-3


class Mailbox:
    """One rank's. alive: whether letters can come.

    data: a ProcessGroupGloo. A letter is on its way until its receiver has posted room for it, and a peer that is gone
    shows when it is written to only.
    """

    def __init__(self, data: Any, waiters: Waiters) -> None:
        self._data, self._waiters = data, waiters
        self._written: list[tuple[int, Wait]] = []
        self._unreachable: set[int] = set()
        self.alive = True
        self._post()

    def write(self, peer: int, letter: bytes) -> None:
        """Sends a letter; does not block."""
        framed = torch.frombuffer(bytearray(len(letter).to_bytes(LENGTH_BYTES, "little") + letter), dtype=torch.uint8)
        self._written.append((peer, self._waiters.posted(lambda: self._data.send([framed], peer, LETTER_TAG))))

    def read(self) -> list[bytes]:
        """The letters that have come; does not block."""
        letters = []
        while self.alive and self._coming.done:
            if self._coming.error is not None:
                self.alive = False
                break
            letters.append(_letter(self._room))
            self._post()
        return letters

    def unreachable(self) -> list[int]:
        """Peers that a letter could not be sent to, each once."""
        lost = {peer for peer, wait in self._written if wait.error is not None} - self._unreachable
        self._written = [(peer, wait) for peer, wait in self._written if not wait.done]
        self._unreachable |= lost
        return sorted(lost)

    def flush(self, seconds: float) -> None:
        """Waits at most so long for the letters that were written to be on their way."""
        end = time.monotonic() + seconds
        while not all(wait.done for _, wait in self._written) and time.monotonic() < end:
            time.sleep(FLUSH_POLL_SECONDS)

    def close(self) -> None:
        """No letter is read any more. Ends all connections."""
        self.alive = False
        for wait in (self._coming, *(wait for _, wait in self._written)):
            wait.give_up()

    def _post(self) -> None:
        room = self._room = torch.zeros(LENGTH_BYTES + LETTER_BYTES, dtype=torch.uint8)
        self._coming: Wait = self._waiters.posted(lambda: self._data.recv_anysource([room], LETTER_TAG))


def _letter(room: Tensor) -> bytes:
    """Its length is not trusted: a letter that is cut does not pass its check."""
    memory = room.numpy().tobytes()
    return memory[LENGTH_BYTES : LENGTH_BYTES + int.from_bytes(memory[:LENGTH_BYTES], "little")]
