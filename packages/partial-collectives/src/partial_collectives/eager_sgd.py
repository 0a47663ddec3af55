"""`EagerSGD`: any torch optimizer, stepped once for every round of a partial allreduce of gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Self

import torch
from communicators import CollectiveError, Communicator, as_communicator, buckets_of
from communicators.replicas.default_group import refuse_alone
from communicators.replicas.first_broadcast import broadcast_parameters
from communicators.replicas.parameters import name_parameters, refuse_changes
from communicators.replicas.place import KEY, check_place, place
from communicators.replicas.wrapped_state import check_loaded, refuse_torch_helpers, wrapped_state
from communicators.replicas.wrapping import Wrapping
from torch import Tensor
from torch.optim import Optimizer

from partial_collectives.partial_allreduce import PartialAllreduce
from partial_collectives.protocol.rules import MAX_STALENESS, Quorum
from partial_collectives.result import PartialResult
from partial_collectives.stragglers.lateness import Lateness

ADVICE = "go on with as many ranks, or save after finish() and load the wrapped optimizer's part alone"


class EagerSGD(Wrapping):
    """Wraps an optimizer so that nobody waits for the last rank's gradient (Li et al., PPoPP 2020).

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1000)
        with EagerSGD(optimizer, model.named_parameters(), scheduler=scheduler) as optimizer:
            for batch in batches:  # as many as this rank has
                optimizer.zero_grad()
                loss(model, batch).backward()
                optimizer.step()

    Each `step()` gives the gradient to a `PartialAllreduce`, and for every round that has been completed since:

        p.grad ← total / P;  optimizer.step();  scheduler.step()

    Rounds are the same on all ranks, so parameters are too, bit for bit, after as many rounds; a rank may take several
    in one step. A gradient that is late goes into a later round, of which it is one summand more; P is the number of
    ranks that took part in the round: all that live. At construction all ranks get rank 0's parameters (not its
    buffers, which stay each rank's own).

    optimizer: built over the live parameters; shared as its param_groups, state and defaults are.
    scheduler: of the wrapped optimizer; stepped here, once for every round. One that is stepped by hand would give
        ranks different rates for the same round.
    weighted: total is divided by the sum of the weights that ranks give to `step(weight=…)`, samples or tokens, not
        by P.
    quorum, max_staleness, grace, seed, on_death: see `PartialAllreduce`.

    `finish()`, or leaving the context, takes part until all ranks have ended. A gradient that is not finite is a
    CollectiveError on every rank, that names the rank, when its round is applied.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        named_parameters: Iterable[tuple[str, Tensor]],
        *,
        comm: Any = None,
        quorum: Quorum = "majority",
        max_staleness: int = MAX_STALENESS,
        scheduler: Any = None,
        grace: float | str = 0.0,
        weighted: bool = False,
        seed: int = 0,
        on_death: Literal["error", "shrink"] = "error",
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer is {type(optimizer).__name__}, expected a torch.optim.Optimizer")
        if scheduler is not None and getattr(scheduler, "optimizer", optimizer) is not optimizer:
            raise ValueError("the scheduler is of another optimizer, expected one of the wrapped optimizer")
        self._by_default, self._comm = comm is None, as_communicator(comm)
        named = name_parameters(optimizer, named_parameters)
        trained = {name: p for name, p in named.items() if p.requires_grad and p.numel()}
        if not trained:
            raise ValueError("no parameter is trainable: there is nothing to exchange")
        super().__init__(optimizer)
        self.scheduler = scheduler
        self._named, self._trained = {id(p): name for name, p in named.items()}, list(trained.values())
        self._weighted, self.applied = weighted, 0
        broadcast_parameters(named, self._comm, what="EagerSGD", settings=f"{weighted=}")
        self._buckets = buckets_of(self._trained)
        like = [torch.empty(bucket.numel, dtype=bucket.dtype, device=bucket.device) for bucket in self._buckets]
        self._rounds = PartialAllreduce(
            like,
            self._comm,
            quorum=quorum,
            max_staleness=max_staleness,
            grace=grace,
            seed=seed,
            on_death=on_death,
        )

    @property
    def comm(self) -> Communicator:
        """The ranks."""
        return self._comm

    @property
    def lateness(self) -> Lateness:
        """Who was last, and by how much."""
        return self._rounds.lateness

    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None, *, weight: float = 1.0
    ) -> float | None:
        """Gives the gradients, and applies every round that is over. See `PartialAllreduce.allreduce`."""
        refuse_torch_helpers("EagerSGD")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._by_default and self._comm.size == 1:
            refuse_alone("an EagerSGD")
        refuse_changes(self.optimizer, self._named, self._trained, what="EagerSGD")
        gradients = [p.grad for p in self._trained]
        self._apply(self._rounds.allreduce([bucket.gather(gradients) for bucket in self._buckets], weight=weight))
        return loss

    def synchronize(self) -> None:
        """Meets all ranks that have more steps, each after as many as it likes; then parameters are the same on all,
        and no gradient is under way. For evaluation, and before a checkpoint."""
        self._apply(self._rounds.synchronize())

    def finish(self) -> None:
        """This rank has no more steps: applies the rest of the rounds until no rank has any."""
        self._apply(self._rounds.finish())

    def close(self) -> None:
        """Frees what it holds, with all other ranks; after `finish()`, else it no longer applies the others' rounds."""
        self._rounds.close()

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state and, as "distributed", this rank's gradients that are in no round yet, rounds
        that were not applied yet, where the rounds stand, and the scheduler's state.

        Another one on every rank: each saves its own. Take it after `synchronize()`, on all ranks.
        """
        refuse_torch_helpers("EagerSGD")
        wrapped, held = wrapped_state(self.optimizer, stepped=self.applied > 0)
        own = {
            **place(self._comm, ADVICE),
            "rounds": self._rounds.state_dict(),
            "applied": self.applied,
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "wrapped": held,
        }
        return {**wrapped, KEY: own}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on where this rank's `state_dict` was taken; for every rank to call, before its first step.

        Raises ValueError for the state of another rank or another number of them, CollectiveError where ranks give
        states of different rounds.
        """
        refuse_torch_helpers("EagerSGD")
        needs = ("rounds", "applied", "scheduler")
        check_place(state_dict, self._comm.rank, self._comm.size, of="an EagerSGD", needs=needs, advice=ADVICE)
        own = state_dict[KEY]
        wrapped = check_loaded({key: value for key, value in state_dict.items() if key != KEY}, own.get("wrapped"))
        self._rounds.load_state_dict(own["rounds"])
        self.optimizer.load_state_dict(wrapped)
        if self.scheduler is not None and own["scheduler"] is not None:
            self.scheduler.load_state_dict(own["scheduler"])
        self.applied = own["applied"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                self.finish()
        except BaseException as failed:
            self._rounds.__exit__(type(failed), failed, None)
            raise
        self._rounds.__exit__(kind, error, trace)

    def _apply(self, results: Iterable[PartialResult]) -> None:
        for result in results:
            if result.nonfinite:
                raise CollectiveError(
                    f"gradients of ranks {list(result.nonfinite)} are not finite in round {result.round}"
                )
            self._put(result)
            self.optimizer.step()
            if self.scheduler is not None:
                self.scheduler.step()
            self.applied += 1

    def _put(self, result: PartialResult) -> None:
        """The mean into p.grad, which is made where there is none."""
        for p in self._trained:
            if p.grad is None:
                p.grad = torch.empty_like(p)
        gradients = [p.grad for p in self._trained if p.grad is not None]
        divisor = result.weight if self._weighted else len(result.members)
        totals = [result.total] if isinstance(result.total, Tensor) else result.total
        for total, bucket in zip(totals, self._buckets, strict=True):
            bucket.scatter(total / divisor, gradients)
