"""Board in a torch Store, which must outlive the ranks: torchrun's agent has one, or `python -m communicators.elastic`.

Not a Store of one of the ranks: with that rank all others would lose it. Where it dies nevertheless, ranks that are
connected go on; only who comes and goes waits until one listens at the same address again, to which the running group
tells its record.
"""

import atexit
import json
import logging
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, TCPStore

from communicators.background.transport_communicator import TransportCommunicator
from communicators.communicator import Communicator
from communicators.elastic.board import PROBE_SECONDS, RECORD, Board, Record, names_in_line
from communicators.errors import CollectiveError
from communicators.worlds.alone import Alone
from communicators.worlds.gloo import GlooTransport
from communicators.worlds.meeting import Rendezvous, in_time, reconnected

T = TypeVar("T")

PORT = 29400
LINE, BEAT = "line", "beat"
LOOK_SECONDS = 0.1
"""Interval between two looks at who waits; a newcomer shows more often that it is there."""
RETRY_SECONDS = 0.2
STORE_SECONDS = 5.0
"""Wait for an answer of the Store, after which another connection is tried."""

SAY_SECONDS = 10.0
"""Interval between two messages of a rank that waits for the Store."""
SERVE = "is `python -m communicators.elastic` running there?"

logger = logging.getLogger("communicators.elastic")


def board_of(meeting: Any, name: str) -> Board:
    """Board of what a user gave to `Elastic`. TypeError or ValueError for what is none, with what to give."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and isinstance(meeting, mpi.Comm):
        raise TypeError(
            "meeting is an MPI communicator, but MPI ends all ranks when one dies, and starts none later: start plain "
            "processes that meet at `python -m communicators.elastic`, Elastic('host:29400')"
        )
    if isinstance(meeting, Communicator):
        board: Board = meeting.board(name)
        return board
    if isinstance(meeting, dist.ProcessGroup):
        raise TypeError("meeting is a process group, whose ranks cannot change: give 'host:port', or a Store")
    if isinstance(meeting, Store):
        return StoreBoard(lambda: reconnected(meeting), name)
    launched = 0
    if meeting is None:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            raise ValueError(
                "no meeting is given, and torchrun's agent has no Store here: run `python -m communicators.elastic` on "
                "one machine, apart from all ranks, and give its address, Elastic('host:29400')"
            )
        meeting = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        launched = int(os.environ["WORLD_SIZE"])
        name += f"/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"  # the Store outlives a restart of all workers
    host, port = _address(meeting)
    return StoreBoard(lambda: _client(host, port), name, launched)


def _client(host: str, port: int) -> Store:
    """Client of a Store that listens; torch's own search for one that does not is long and loud."""
    try:
        socket.create_connection((host, port), timeout=STORE_SECONDS).close()
    except OSError as error:
        raise RuntimeError(f"no Store at {host}:{port}: {error}") from error
    return TCPStore(host, port, wait_for_workers=False, timeout=timedelta(seconds=STORE_SECONDS))


def _address(meeting: Any) -> tuple[str, int]:
    host, _, port = meeting.rpartition(":") if isinstance(meeting, str) else ("", "", "")
    if not host or not port.isdigit():
        raise ValueError(
            f"meeting is {meeting!r}, expected 'host:port' of `python -m communicators.elastic`, or a Store"
        )
    return host, int(port)


class StoreBoard(Board):
    """Board in a Store, by clients of its own, made anew where one is lost.

    open_store: makes a client.
    """

    settling = 5 * LOOK_SECONDS

    def __init__(self, open_store: Callable[[], Store], name: str, launched: int = 0) -> None:
        self._open, self._prefix, self.launched = open_store, name, launched
        self._store: Store | None = None
        self.name = ""
        self._beats, self._met, self._exits = 0, False, False
        self._known = ""  # record of this rank's generation, for a Store that has lost it
        self._watch: threading.Thread | None = None
        self._fresh: tuple[str, ...] = ()
        self._ending = threading.Event()
        self._close: Callable[[], object] | None = None

    def get(self, key: str) -> str:
        def get(store: Store) -> str:
            return store.get(key).decode(errors="replace") if store.check([key]) else ""

        text = self._asked(get)
        if key == RECORD:
            if not text and self._known:  # a new Store in the place of one that died
                text = self.swap(RECORD, "", self._known)
            self._known = text if self.name in Record.of(text).members else ""
        return text

    def swap(self, key: str, expected: str, desired: str) -> str:
        return self._asked(lambda store: bytes(store.compare_set(key, expected, desired)).decode(errors="replace"))

    def append(self, key: str, text: str) -> None:
        self._asked(lambda store: store.append(key, text))

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)

    clock = staticmethod(time.monotonic)

    def wait_in_line(self) -> None:
        if self._ending.is_set():  # it had given up, and waits anew
            if self._watch is not None:
                self._watch.join()
            self._watch = None
            self._ending.clear()
        self.name = self.name or f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        self._change_line(lambda line: line if self.name in line else [*line, self.name])  # a new Store has none
        self._beats += 1
        self._asked(lambda store: store.set(f"{BEAT}/{self.name}", str(self._beats)))

    def leave_line(self) -> None:
        self._change_line(lambda line: [name for name in line if name != self.name])

    def waiting(self) -> tuple[str, ...]:
        if self._watch is None:
            self._watch = threading.Thread(target=self._look, name="communicators-board", daemon=True)
            atexit.register(self._end)
            self._watch.start()
        return self._fresh

    def connect(self, record: Record, timeout: float) -> Communicator:
        if len(record.members) == 1:
            return Alone()
        rank, size = record.members.index(self.name), len(record.members)
        try:
            own, shared = (PrefixStore(f"{self._prefix}/{record.generation}", self._open()) for _ in range(2))
            there = Rendezvous(rank, size, own, shared, connections=self.connections)
            made = TransportCommunicator(in_time(lambda: GlooTransport(there, timeout), rank, timeout))
        except CollectiveError:
            raise
        except RuntimeError as error:
            raise CollectiveError(f"the Store does not answer: {error}") from error
        made.hasty = True
        return made

    def unreached(self, generation: int, names: Sequence[str]) -> tuple[str, ...]:
        """Tries a group of two with each of them, which goes the same ways as that of all; see `Board`."""

        def meet(other: str) -> None:
            pair, wait = sorted((self.name, other)), timedelta(seconds=PROBE_SECONDS)
            keys = PrefixStore(f"{self._prefix}/{generation}/{pair}", self._open())
            group: Any = ProcessGroupGloo(keys, pair.index(self.name), 2, wait)
            group.barrier().wait()  # one that closes sooner breaks off the other's connecting

        def reaches(other: str) -> bool:
            with suppress(RuntimeError):
                in_time(lambda: meet(other), 0, PROBE_SECONDS)  # gloo may try for longer
                return True
            return False

        with ThreadPoolExecutor(len(names) or 1) as pool:
            return tuple(name for name, reached in zip(names, pool.map(reaches, names), strict=True) if not reached)

    def at_exit(self, close: Callable[[], object]) -> None:
        if self._close is None:
            atexit.register(self._end)
        self._close = close

    def retire(self) -> None:
        self._close = None
        self._ending.set()
        if self._watch is None:
            atexit.unregister(self._end)

    def _end(self) -> None:
        """Closes what is still there; a thread amid a call of the Store's would abort the process at its end."""
        self._ending.set()
        if self._watch is not None:
            self._watch.join(STORE_SECONDS)
        self.patience, self._exits = 0.0, True  # nobody waits for a Store that is gone
        with suppress(TimeoutError):
            if self._close is not None:
                self._close()

    def _change_line(self, change: Callable[[list[str]], list[str]]) -> None:
        while True:
            text = self.get(LINE)
            changed = json.dumps(change(names_in_line(text)))
            if self.swap(LINE, text, changed) == changed:
                return

    def _look(self) -> None:
        """Watches who waits, with a client of its own: whoever has shown so since the last look."""
        store, beats = None, dict[str, bytes]()
        while not self._ending.wait(LOOK_SECONDS):
            try:
                store = store or PrefixStore(self._prefix, self._open())
                if self._known:  # to a new Store in the place of one that died, before others found a group there
                    store.compare_set(RECORD, "", self._known)
                line = names_in_line(store.get(LINE).decode(errors="replace")) if store.check([LINE]) else []
                line = [name for name in line if store.check([f"{BEAT}/{name}"])]
                now = {name: store.get(f"{BEAT}/{name}") for name in line}
                self._fresh = tuple(name for name in line if beats.get(name) not in (None, now[name]))
                beats = now
            except RuntimeError:  # the Store does not answer, or its line is unreadable, which who joins is told
                store, self._fresh = None, ()
        atexit.unregister(self._end)  # which waits for this thread, and keeps the board's connections

    def _asked(self, ask: Callable[[Any], T]) -> T:
        """Answer of the Store, for which this rank waits as long as it takes: nobody comes or goes without it."""
        began = told = time.monotonic()
        while True:
            try:
                if self._store is None:
                    self._store = PrefixStore(self._prefix, self._open())
                answer = ask(self._store)
                self._met = True
                return answer
            except RuntimeError as error:
                self._store, now = None, time.monotonic()
                if (self._exits or not self._met) and now - began > self.patience:
                    raise TimeoutError(f"{error}; {SERVE}") from error
                if now - told > SAY_SECONDS:
                    told = now
                    logger.warning("waits for the Store: %s; %s", error, SERVE)
            time.sleep(RETRY_SECONDS)
