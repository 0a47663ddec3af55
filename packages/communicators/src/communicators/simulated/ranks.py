"""Rank threads of a simulated world: only the one that holds the baton runs."""

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Generic, TypeAlias, TypeVar

import torch

T = TypeVar("T")
Context: TypeAlias = tuple[int, ...]
"""A communicator of the world: () the first one, (2, 0) the first duplicate of its third duplicate."""
Turns: TypeAlias = Callable[[], AbstractContextManager[None]]
"""Makes the context that each turn of a rank's thread is inside of."""


class Killed(BaseException):
    """Unwinds the thread of a rank that died."""


class Watch:
    """Rank that waits for a condition which signals of a communicator bring about."""

    def __init__(self, rank: int, context: Context, over: Callable[[], bool]) -> None:
        self.rank, self.context, self.over = rank, context, over
        self.done = False

    def waits(self) -> str:
        """Phrase that says who waits for what."""
        return f"rank {self.rank} waits for a signal"


class RankThread(Generic[T]):
    """A thread that runs only between `resume` and `give_back`.

    over: its body has ended, with a `result` or an `error`. dead: it ends at its next turn.
    during: makes the context that each of its turns is inside of.
    """

    def __init__(self, body: Callable[[], T], during: Turns) -> None:
        self._during = during
        self.result: Any = None
        self.error: BaseException | None = None
        self.dead = self.over = False
        self._turn, self._back = threading.Lock(), threading.Lock()
        self._turn.acquire()
        self._back.acquire()
        self._thread = threading.Thread(target=self._live, args=(body,), daemon=True)
        self._thread.start()

    def resume(self) -> None:
        """Called by the loop: lets the rank run until it gives the baton back or ends."""
        if not self.over:
            with self._during():
                self._turn.release()
                self._back.acquire()

    def give_back(self) -> None:
        """Called by the rank: lets the loop run until it resumes this rank."""
        if self.dead:  # what it does while it unwinds waits for nobody
            raise Killed
        self._back.release()
        self._turn.acquire()
        if self.dead:
            raise Killed

    def kill(self) -> None:
        """Called by the loop: ends the thread if it has not ended by itself, and waits until nothing is left of it."""
        self.dead = True
        self.resume()
        self._thread.join()  # amid its end it would hold tensors while the process ends

    def _live(self, body: Callable[[], T]) -> None:
        self._turn.acquire()
        try:
            if not self.dead:
                self.result = body()
        except Killed:
            pass
        except BaseException as error:  # raised again in the thread of the loop's caller
            self.error = error
        self.over = True
        self._back.release()


class OwnGenerator:
    """Generator of one rank, on the CPU. seed: the world's, the same on all ranks."""

    def __init__(self, seed: int, rank: int) -> None:
        own = random.Random(f"{seed} {rank}").getrandbits(63)
        self._state = torch.Generator().manual_seed(own).get_state()

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Makes it torch's global generator inside the context; takes 15 µs."""
        before = torch.get_rng_state()
        torch.set_rng_state(self._state)
        try:
            yield
        finally:
            self._state = torch.get_rng_state()
            torch.set_rng_state(before)
