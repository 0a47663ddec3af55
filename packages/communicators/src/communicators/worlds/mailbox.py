"""Short messages by gloo, beside the data: a receive from every peer is always posted, and tells when one is gone."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from communicators.background.transport import PeerLost, SignalLine
from communicators.worlds.gloo_group import GlooGroup
from communicators.worlds.waiters import Wait, Waiters

LENGTH_BYTES = 4
FLUSH_POLL_SECONDS = 1e-3


class Mailbox:
    """Mailbox of one rank. Each receive has a waiter's thread; gloo's receive from anybody could not be ended.

    tag: of all messages. nbytes: the most that one holds. A message is on its way until its receiver has posted room
    for it.
    """

    def __init__(self, data: GlooGroup, rank: int, size: int, waiters: Waiters, *, tag: int, nbytes: int) -> None:
        self._data, self._waiters, self._tag, self._nbytes = data, waiters, tag, nbytes
        self._written: list[Wait] = []
        self._coming = {peer: self._post(peer) for peer in range(size) if peer != rank}

    def write(self, peer: int, message: bytes) -> Wait:
        """Sends a message; does not block."""
        framed = torch.frombuffer(bytearray(len(message).to_bytes(LENGTH_BYTES, "little") + message), dtype=torch.uint8)
        wait = self._waiters.posted(lambda: self._data.send([framed], peer, self._tag))
        self._written = [*(written for written in self._written if not written.done), wait]
        return wait

    def read(self) -> list[tuple[int, bytes]]:
        """The messages that have come, by source; does not block."""
        messages = []
        for peer, (room, wait) in list(self._coming.items()):
            if wait.done and wait.error is None:
                messages.append((peer, _message(room)))
                self._coming[peer] = self._post(peer)
        return messages

    def lost(self) -> PeerLost | None:
        """A peer whose connection is gone."""
        errors = ((peer, wait.error) for peer, (_, wait) in self._coming.items())
        return next((PeerLost(peer, error) for peer, error in errors if error is not None), None)

    def unreachable(self) -> list[int]:
        """Peers whose connection is gone."""
        return [peer for peer, (_, wait) in self._coming.items() if wait.error is not None]

    def flush(self, seconds: float) -> None:
        """Waits at most `seconds` for the messages that were written to be on their way."""
        end = time.monotonic() + seconds
        while not all(wait.done for wait in self._written) and time.monotonic() < end:
            time.sleep(FLUSH_POLL_SECONDS)

    def open(self) -> list[Wait]:
        """Messages in flight, sent and received."""
        return [*(wait for _, wait in self._coming.values()), *self._written]

    def close(self) -> None:
        """Ends all receives, with their connections."""
        for wait in self.open():
            wait.give_up()

    def _post(self, peer: int) -> tuple[Tensor, Wait]:
        room = torch.zeros(LENGTH_BYTES + self._nbytes, dtype=torch.uint8)
        return room, self._waiters.posted(lambda: self._data.recv([room], peer, self._tag))


class GlooSignalLine(SignalLine):
    """Signal line over a mailbox of its own.

    abandon: takes what is still in flight at the end, because ending it closes connections.
    """

    def __init__(self, mailbox: Mailbox, abandon: Callable[[list[Wait]], None]) -> None:
        self._mailbox, self._abandon = mailbox, abandon
        self._sending: dict[int, Wait] = {}

    def send(self, peer: int, message: bytes) -> None:
        self._sending[peer] = self._mailbox.write(peer, message)

    def sent(self, peer: int) -> bool:
        wait = self._sending.get(peer)
        if wait is not None and wait.error is not None:
            raise PeerLost(peer, wait.error)
        return wait is None or wait.done

    def received(self) -> list[tuple[int, bytes]]:
        return self._mailbox.read()

    def close(self) -> None:
        self._abandon(self._mailbox.open())


def _message(room: Tensor) -> bytes:
    """Message in a buffer. Its length is not trusted: a message that is cut does not pass its check."""
    memory = room.numpy().tobytes()
    return memory[LENGTH_BYTES : LENGTH_BYTES + int.from_bytes(memory[:LENGTH_BYTES], "little")]
