"""Letters by gloo, beside the data: a receive from every peer is always posted, which also tells when one is gone."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from communicators.background.abort import LETTER_BYTES
from communicators.background.call import TAG_BITS
from communicators.background.transport import PeerLost
from communicators.worlds.waiters import Wait, Waiters

LETTER_TAG = 1 << TAG_BITS
LENGTH_BYTES = 4
FLUSH_POLL_SECONDS = 1e-3


class Mailbox:
    """One rank's. Each receive has a waiter's thread; gloo's receive from anybody could not be ended.

    data: a ProcessGroupGloo. A letter is on its way until its receiver has posted room for it.
    """

    def __init__(self, data: Any, rank: int, size: int, waiters: Waiters) -> None:
        self._data, self._waiters = data, waiters
        self._written: list[Wait] = []
        self._coming = {peer: self._post(peer) for peer in range(size) if peer != rank}

    def write(self, peer: int, letter: bytes) -> None:
        """Sends a letter; does not block."""
        framed = torch.frombuffer(bytearray(len(letter).to_bytes(LENGTH_BYTES, "little") + letter), dtype=torch.uint8)
        self._written = [wait for wait in self._written if not wait.done]
        self._written.append(self._waiters.posted(lambda: self._data.send([framed], peer, LETTER_TAG)))

    def read(self) -> list[bytes]:
        """The letters that have come; does not block."""
        letters = []
        for peer, (room, wait) in list(self._coming.items()):
            if wait.done and wait.error is None:
                letters.append(_letter(room))
                self._coming[peer] = self._post(peer)
        return letters

    def lost(self) -> PeerLost | None:
        """A peer whose connection is gone."""
        errors = ((peer, wait.error) for peer, (_, wait) in self._coming.items())
        return next((PeerLost(peer, error) for peer, error in errors if error is not None), None)

    def unreachable(self) -> list[int]:
        """All such peers."""
        return [peer for peer, (_, wait) in self._coming.items() if wait.error is not None]

    def flush(self, seconds: float) -> None:
        """Waits at most so long for the letters that were written to be on their way."""
        end = time.monotonic() + seconds
        while not all(wait.done for wait in self._written) and time.monotonic() < end:
            time.sleep(FLUSH_POLL_SECONDS)

    def close(self) -> None:
        """Ends all receives, with their connections."""
        for wait in (*(wait for _, wait in self._coming.values()), *self._written):
            wait.give_up()

    def _post(self, peer: int) -> tuple[Tensor, Wait]:
        room = torch.zeros(LENGTH_BYTES + LETTER_BYTES, dtype=torch.uint8)
        return room, self._waiters.posted(lambda: self._data.recv([room], peer, LETTER_TAG))


def _letter(room: Tensor) -> bytes:
    """Its length is not trusted: a letter that is cut does not pass its check."""
    memory = room.numpy().tobytes()
    return memory[LENGTH_BYTES : LENGTH_BYTES + int.from_bytes(memory[:LENGTH_BYTES], "little")]
