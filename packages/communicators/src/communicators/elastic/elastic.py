"""`Elastic`: a communicator whose ranks may die, leave and come between two steps.

An atomic exchange ends with a commit, ⌈log P⌉ tiny messages, which a rank enters with the result in hand. Where a rank
dies in either, the survivors announce what they hold, and the next record says how many exchanges stand: if one
survivor has come through the commit, all of them hold the result, and keep it; else none has used it, and the exchange
is done again among those left (Skeen's three-phase commit, SIGMOD 1981, with the board in place of a coordinator).
"""

import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch.utils.data import default_collate

from communicators import errors
from communicators.communicator import Work, run
from communicators.elastic import transfer
from communicators.elastic.membership import LEAVES, MOST_FAILURES, WAITING, LeftOutError, Membership, connected
from communicators.errors import CollectiveError
from communicators.schedules.dense import allgather, barrier

T = TypeVar("T")


class Elastic(Membership):
    """Ranks that may come and go, for optimizers that take it as `comm`.

        world = Elastic(at_least=2)                     # under torchrun; or Elastic("head:29400", at_least=2)
        optimizer = DiLoCo(inner, model=model, comm=world)
        for batch in world.deal(dataset, batch_size=64): ...

    A rank enters at the first use, which waits for the others, or until those who train let it in between two steps.

    Args:
        meeting: "host:port" of `python -m communicators.elastic`; a torch Store that outlives the ranks; a simulated
            world's communicator; by default the Store of torchrun's agent.
        at_least: Ranks with which training goes on; with fewer it waits, and says whom for.
        start_with: Ranks with which it starts, unless no more come within 10 s; default as many as torchrun has
            started, else `at_least`.
        timeout: Seconds to wait for a late rank before the others go on without it.
        patience: Seconds to wait for others to come; TimeoutError then.
        connections: TCP connections to each peer, as of `as_communicator`; a simulated world has none.
        name: Name of this training, for several with one Store.

    Attributes:
        generation: Number of the current group, from 1 on; `rank` and `size` are those in it.
    """

    elastic = True
    _inside = False
    _owner: weakref.ref[Any] | None = None
    _gifts: tuple[Work[Any], ...] = ()
    _carried: tuple[Any, ...] = ()

    def atomic(
        self,
        exchange: Callable[[], T],
        undo: Callable[[], object] = lambda: None,
        seal: Callable[[], bool] | None = None,
    ) -> T:
        """Result of an exchange that all survivors take, or none: then it is undone, and done again among those left.

        Args:
            exchange: Makes collective calls over this communicator, on all ranks alike.
            undo: Takes back what `exchange` has changed; called also where it has changed nothing.
            seal: Follows the commit, and has the last word, where ranks go on for long without this communicator
                afterwards: a rank that a death keeps from the commit would wait as long for those who have come
                through. One truth on all survivors: False if one of them has undone the exchange instead.

        Raises:
            LeftOutError: The others have gone on without this rank.
            CollectiveError: What `exchange` raises, where no rank was lost; or it has failed again and again though all
                ranks are there.
        """
        if self._inside:
            return exchange()
        self.group  # noqa: B018 - enters
        self._inside, began = True, self.clock()
        members, failures = self.members, 0
        last: CollectiveError | None = None
        try:
            while True:
                held: list[T] = []
                try:
                    held.append(exchange())
                    self._commit()
                    if seal is None or seal():
                        return held[0]
                except CollectiveError as error:
                    self._refuse_other(error)
                    last = error
                if self._joining:  # without a state, which was under way in this generation
                    undo()
                    self.join_anew()
                    members, began = self.members, self.clock()
                    continue
                if seal is not None and held:
                    undo()  # at once: others are in the seal
                if self._regroup(began, holds=bool(held) and seal is None):
                    return held[0]
                if seal is None:
                    undo()
                again = self.members == members and self.size >= self._at_least  # of fewer, some wait for others
                members, failures = self.members, failures + 1 if again else 0
                if failures == MOST_FAILURES:
                    self._tell_end()
                    raise CollectiveError(
                        f"{MOST_FAILURES} attempts at one exchange have failed though all {self.size} ranks are there"
                        f"{f', at last because {last}' if last else ''}; where it takes longer than "
                        f"timeout={self.timeout:g} s, give more on all ranks"
                    ) from last
                began = self.clock()
        finally:
            self._inside = False

    def boundary(self, give: Callable[[], Mapping[str, Any]]) -> bool:
        """Lets in newcomers, and lets go who leaves, between two steps; every rank calls it there.

        Args:
            give: This rank's state for a newcomer, of plain values and tensors.

        Returns:
            Whether the group has changed.
        """
        if self._inside:
            raise RuntimeError("boundary() inside atomic(): ranks come and go between two exchanges, call it after")
        before = self.generation
        while any(word >= WAITING for word in self._words) or self.size < self._at_least:
            if self.leaving and any(word & LEAVES for word in self._words):
                self._go()
                return True
            self._regroup(self.clock(), admits=True)
        self.serve(give)
        return self.generation != before

    def part(self, gone: Collection[str]) -> None:
        """Parts ranks that have gone on without each other; every rank calls it, inside `atomic`.

        Args:
            gone: Names of ranks without which this one has gone on.

        Raises:
            LeftOutError: On who lacks most others, of several the last.
            CollectiveError: On the others, so that they go on without it.
        """
        own = torch.tensor([name in gone for name in self.members], device="cpu")
        views = run(allgather(own, self.rank, self.size), self, facts="who has gone on without whom")
        unreached = [[name for name, lost in zip(self.members, view, strict=True) if lost] for view in views]
        name, going_on = self.members[self.rank], connected(dict(zip(self.members, unreached, strict=True)))
        if name not in going_on:
            self.close()
            raise LeftOutError(
                f"{name} was left out: it and others had lost each other for {self.timeout:g} s, and each went on; "
                "make a new Elastic and a new optimizer to join anew"
            )
        if len(going_on) < self.size:
            run(barrier(self.rank, self.size), self, facts="ranks part")

    def catch_up(self) -> None:
        group = self.group
        if not self._inside and group.failure is not None and errors.is_loss(group.failure):
            self._regroup(self.clock())

    def take(self) -> Mapping[str, Any] | None:
        if not self._joining:
            return super().take()
        if not self._has_state():
            return None
        assert self._given is not None
        self._joining = False
        own: Mapping[str, Any] = self._given["own"]
        self._given = {"carried": self._given["carried"]}
        return own

    def join_anew(self) -> None:
        self._join_anew()
        if not self._joining:
            self._go()
            raise LeftOutError(
                f"all ranks that trained have gone before {self._board.name} had their state: make a new Elastic and a "
                "new optimizer to begin anew"
            )

    def claim(self, owner: Any, *, anew: bool = False) -> None:
        if anew:
            self._owner = weakref.ref(owner)
        other = None if self._owner is None else self._owner()
        if other not in (None, owner):
            raise ValueError(
                f"this Elastic belongs to a later {type(other).__name__}, and newcomers get one optimizer's state: "
                "give each optimizer an Elastic of its own, with another name="
            )

    def deal(
        self,
        dataset: Any,
        *,
        batch_size: int,
        seed: int = 0,
        epochs: int | None = None,
        collate_fn: Callable[[list[Any]], Any] = default_collate,
    ) -> Iterator[Any]:
        """Batches of this rank: each sample once an epoch, whoever comes and goes.

        Args:
            dataset: Samples by number, and their number by `len`; the same on all ranks.
            batch_size: Global batch, of all ranks together; a rank takes its share. One sample a rank, where there are
                more ranks.
            seed: Seed of the order, alike on all ranks.
            epochs: Epochs after which it ends, counted from the beginning of the training, so that a newcomer ends with
                the others; by default with the epoch under way.
            collate_fn: Makes a batch of a list of samples.

        Yields:
            Batches. What a dead rank drew since its last exchange is dealt again; what it drew before, it counts as
            having trained on: draw a batch when it is needed, in the thread that trains.

        Raises:
            RuntimeError: A batch is drawn in another thread than that which exchanges.
        """
        self.joining  # noqa: B018 - enters, and waits for a state
        self._thread = threading.get_ident()
        until = self._dealer.epochs + 1 if epochs is None else epochs
        return self._dealer.batches(dataset, batch_size, seed, until, collate_fn, self._goes_on)

    def _goes_on(self) -> bool:
        """Whether this rank draws a batch and has not left, once newcomers of the step before are let in."""
        if self._given is not None and len(self._carried) < (given := len(self._given["carried"])):
            self.close()
            raise ValueError(f"{len(self._carried)} objects are carried, but {given} by those who train: carry all")
        if self._thread != threading.get_ident():
            raise RuntimeError(
                "a batch was drawn in another thread than that which trains: what is drawn ahead counts as used, and "
                "would come twice or never where ranks come and go; draw each batch when you train on it"
            )
        owner = None if self._owner is None else self._owner()
        if owner is not None:
            owner.admit()
        return not (self.leaving and self._over)

    @property
    def epochs(self) -> int:
        """Epochs that this rank has drawn to their end; a newcomer begins with the others' number."""
        self.joining  # noqa: B018 - enters, and waits for a state
        return self._dealer.epochs

    def leave(self) -> None:
        """Has this rank leave at the end of the current step, where all others go on without it; `deal` ends then."""
        self.leaving = True

    def close(self) -> None:
        """Leaves at once; the others go on."""
        if not self._over:
            self._go()

    def serve(self, give: Callable[[], Mapping[str, Any]]) -> None:
        """Gives newcomers the state of one of the ranks that have it, which goes on meanwhile.

        Args:
            give: See `boundary`.
        """
        if not self._unserved:
            return
        self._gifts = tuple(gift for gift in self._gifts if not gift.is_completed())
        unserved, self._unserved = self._unserved, ()
        for name in unserved:
            if self._donor_of(name) == self.rank:
                state = transfer.packed(
                    {
                        "own": dict(give()),
                        "carried": [transfer.state_of(one) for one in self._carried],
                        "dealer": self._dealer.state(),
                    }
                )
                pair = [self.rank, self.members.index(name)]
                with suppress(CollectiveError):  # it has died already
                    gift = self.group.aside(transfer.give(state), pair, facts=f"state for {name}")
                    self._gifts = *self._gifts, gift

    def carry(self, *objects: Any) -> None:
        """Has newcomers get the state of schedulers, scalers and the like; every rank calls it alike, before it trains.

        Args:
            *objects: Objects with `state_dict` and `load_state_dict`.
        """
        self.joining  # noqa: B018 - enters, and waits for a state
        first = len(self._carried)
        self._carried += objects
        if self._given is not None:
            given = self._given["carried"]
            if len(self._carried) > len(given):
                raise ValueError(f"{len(self._carried)} objects are carried, but {len(given)} by those who train")
            for one, state in zip(objects, given[first : len(self._carried)], strict=True):
                transfer.restore(one, state)
