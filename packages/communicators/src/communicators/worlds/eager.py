"""Messages of rounds over gloo, short ones without waiting for their receiver: MPI's eager protocol.

gloo holds a message back until it knows that its receiver has posted room for it. Between ranks that post at the same
time, that word costs as much as the message: a round takes 2α. Rooms that are posted before they are asked for make it
one α. What is longer than a room takes gloo's 2α, or 3α where its receiver does not know the length.
"""

from __future__ import annotations

import struct
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from communicators.worlds.gloo_group import EAGER_TAG, PIECE_BYTES, GlooGroup, Wait

ROOM_BYTES = 2 * PIECE_BYTES - 1
"""Most bytes that are sent without a word from the receiver: of what never goes by several connections."""
ROOMS = 4
"""Posted for each peer."""
_HEAD = struct.Struct("<QQ")  # tag, and bytes of the whole message; of a size that keeps what follows aligned


class EagerMessages:
    """Sends and receives of one group, told apart by their tags. Lengths of both sides are alike, unless `bounded`."""

    def __init__(self, data: GlooGroup) -> None:
        self._data = data
        self._inboxes = {peer: _Inbox(data, peer) for peer in data.others}  # now: threads may meet a peer at once

    def send(self, memory: Tensor, peer: int, tag: int, *, call: int = 0, bounded: bool) -> list[Wait]:
        """Posts a message. call: its number, since tags of two may be alike.

        bounded: its receiver, who does not know the length, gets what is beyond a room later.
        """
        nbytes = memory.numel()
        if nbytes > ROOM_BYTES and not bounded:
            return [self._data.post("send", memory, peer, tag, spread=True)]
        framed = _bytes(_HEAD.size + min(nbytes, ROOM_BYTES))
        body = framed.numpy()  # copied by NumPy: torch would start threads of OpenMP for each of ours
        body[: _HEAD.size] = bytearray(_HEAD.pack(call << 32 | tag, nbytes))
        body[_HEAD.size :] = memory.numpy()[:ROOM_BYTES]
        waits = [self._data.post("send", framed, peer, EAGER_TAG)]
        if nbytes > ROOM_BYTES:
            waits.append(self._data.post("send", memory[ROOM_BYTES:], peer, tag))
        return waits

    def receive(self, memory: Tensor, peer: int, tag: int, *, call: int = 0, bounded: bool) -> Arrival:
        """Posts room for a message of this tag."""
        if memory.numel() > ROOM_BYTES and not bounded:
            return Arrival(memory, self._data.post("recv", memory, peer, tag, spread=True))
        return self._inboxes[peer].receive(Arrival(memory, tag=tag, key=call << 32 | tag))

    def cancel(self, arrivals: Mapping[int, Arrival]) -> None:
        """Lets go of messages that may never come, by peer; those that do are dropped."""
        for peer, arrival in arrivals.items():
            if not arrival.wait.done:
                self._inboxes[peer].cancel(arrival)


@dataclass(eq=False)
class Arrival:
    """Message that is expected. wait: for its bytes beyond a room, or all of them. key: that of its head."""

    memory: Tensor
    wait: Wait = field(default_factory=lambda: Wait(None))
    tag: int = 0
    key: int = 0


class _Inbox:
    """Rooms for one peer's messages, which come in any order of tags; a thread waits for the room that is filled next.

    As many are posted as are not held by messages that nobody has asked for yet: so a peer that runs ahead is held
    back. While one is asked for all are posted, or it could wait behind those for ever.
    """

    def __init__(self, data: GlooGroup, peer: int) -> None:
        self._data, self._peer, self._lock = data, peer, threading.Lock()
        self._posted: deque[tuple[Tensor, Any]] = deque()
        self._free: list[Tensor] = []
        self._early: dict[int, Tensor] = {}
        self._asked: dict[int, Arrival] = {}
        self._unwanted: set[int] = set()
        self._waiting: Wait | None = None
        self._failure: BaseException | None = None

    def receive(self, arrival: Arrival) -> Arrival:
        with self._lock:
            if arrival.key in self._early:
                self._deliver(self._early.pop(arrival.key), arrival)
            else:
                self._asked[arrival.key] = arrival
            self._post_rooms()
            if self._waiting is None and (wait := self._next()) is not None:
                self._data.waiters.begin(wait)
        if arrival.wait.done:
            self._data.waiters.tell()
        return arrival

    def cancel(self, arrival: Arrival) -> None:
        with self._lock:
            if self._asked.pop(arrival.key, None) is not None:
                self._unwanted.add(arrival.key)

    def _post_rooms(self) -> None:
        """Posts as many as are missing; where none can be, all that is asked for has failed."""
        wanted = ROOMS if self._asked else ROOMS - len(self._early)
        try:
            while len(self._posted) < wanted and self._failure is None:
                room = self._free.pop() if self._free else _bytes(_HEAD.size + ROOM_BYTES)
                self._posted.append((room, self._data.work("recv", room, self._peer, EAGER_TAG)))
        except RuntimeError as error:
            self._failure = error.with_traceback(None)
        if self._failure is not None and not self._posted:
            for arrival in self._asked.values():
                arrival.wait = Wait(None, done=True, error=self._failure)
            self._asked.clear()

    def _next(self) -> Wait | None:
        """The wait for the room that is filled next."""
        self._waiting = Wait(self._posted[0][1], then=self._came) if self._posted else None
        return self._waiting

    def _came(self) -> Wait | None:
        """Hands on what has come into the first room."""
        with self._lock:
            room, _ = self._posted.popleft()
            try:
                if self._waiting is not None and self._waiting.error is not None:
                    raise self._waiting.error
                self._sort(room)
            except Exception as error:  # else all that is asked for would wait for ever
                self._failure = error.with_traceback(None)
                self._posted.clear()
            self._post_rooms()
            return self._next()

    def _sort(self, room: Tensor) -> None:
        """Delivers what was asked for, keeps what is early, and drops what nobody wants any more."""
        key, _ = _HEAD.unpack_from(room.numpy().data)
        if (arrival := self._asked.pop(key, None)) is not None:
            self._deliver(room, arrival)
        elif key in self._unwanted:
            self._unwanted.discard(key)
        else:
            self._early[key] = room

    def _deliver(self, room: Tensor, arrival: Arrival) -> None:
        """Copies a message to where it was asked for, as far as it fits; what is beyond a room comes by itself."""
        _, nbytes = _HEAD.unpack_from(room.numpy().data)
        here, there = room.numpy()[_HEAD.size :][:nbytes], arrival.memory.numpy()
        there[: len(here)] = here[: len(there)]
        if ROOM_BYTES < nbytes <= len(there):
            arrival.wait = self._data.post("recv", arrival.memory[ROOM_BYTES:nbytes], self._peer, arrival.tag)
        else:
            arrival.wait = Wait(None, done=True)
        if len(self._free) < ROOMS:
            self._free.append(room)


def _bytes(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
