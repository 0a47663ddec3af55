"""`EagerSGD`: any torch optimizer, stepped once for every round of a partial allreduce of gradients."""

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Self, Unpack

import torch
from communicators import CollectiveError, Elastic, Stats, buckets_of, run, schedules
from replicas import Buffers, ElasticRounds, Wrapping, check_like, load_into, refuse_unlike
from torch import Tensor, nn
from torch.optim import Optimizer

from partial_collectives.partial_allreduce import PartialAllreduce, RoundSettings
from partial_collectives.result import PartialResult
from partial_collectives.settings import as_facts, changes, check_steps, check_verify, refuse_changed, settings_of
from partial_collectives.stragglers import Lateness

COUNTS = ("applied", "gradients", "unscheduled")


class EagerSGD(Wrapping):
    """Wraps an optimizer so that nobody waits for the last rank's gradient (Li et al., PPoPP 2020).

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1000)
        with EagerSGD(optimizer, model.named_parameters(), scheduler=scheduler) as optimizer:
            for batch in batches:  # as many as this rank has
                optimizer.zero_grad()
                loss(model, batch).backward()
                optimizer.step()

    Each `step()` gives the gradient to a `PartialAllreduce`, and for every round that has been completed since:

        p.grad ← total / P;  optimizer.step()

    Rounds are the same on all ranks, so parameters are too, bit for bit, after as many rounds; a rank may take several
    in one step. A late gradient goes into a later round, as one more summand; P is the number of ranks that took part
    in the round: all that live. A parameter without a gradient counts as zeros; those of 16 bits are added up in 32.
    Late gradients act like momentum (Mitliagkas et al., Allerton 2016): models learned better with Nesterov's form of
    SGD's, and with 0.5 for Adam's first beta. Clipping before `step()` clips this rank's gradient; the mean is clipped
    by a hook of the wrapped optimizer (`register_step_pre_hook`), which returns nothing. At construction all ranks get
    rank 0's parameters, and the buffers of `model`.

    The module is a plain one: DDP round it would sum dense gradients first, and wait for all ranks. A warning says so
    only where it is seen: `model` is or holds a DDP module, or all names begin with "module.".

    `finish()`, or leaving the context, takes part until all ranks have ended. A gradient that is not finite is a
    CollectiveError on every rank, that names the rank, when its round is applied.

    Over an `Elastic` rounds go on without ranks that die, and newcomers are let in where all meet: at `synchronize()`,
    so call it at the end of every epoch at least, as a newcomer waits for it. It gets parameters, the states of
    optimizer and scheduler and the number of rounds from one of the others; `lateness` begins anew with the group. A
    dead rank's gradients that were in no round are lost. Rounds go on while a newcomer takes over that state, where
    their quorum and `max_staleness` allow. A rank that the others take for dead gets a CollectiveError,
    LeftOutError where they have met without it, and may join anew.

    Args:
        optimizer: Built over the live parameters; shared as its param_groups, state and defaults are. It must need its
            closure only once, which LBFGS does not.
        named_parameters: Parameters of the model, as `model.named_parameters()` gives them.
        comm: See `communicators.as_communicator`.
        scheduler: Scheduler of the wrapped optimizer; stepped here, once for every P gradients in the rounds, so that
            it is as long as the steps that a rank takes, in the mean, however many rounds those need; after a death by
            some more or fewer, as the dead rank was ahead or behind. Rates that change otherwise between two rounds,
            and so go by a rank's own steps, are a ValueError: ranks would part in silence.
        weighted: Divides the total by the sum of the weights that ranks give to `step(weight=…)`, samples or tokens,
            not by P. A gradient is then the mean over them.
        model: Module that has buffers, such as BatchNorm's.
        buffers: "keep", they differ between ranks, in evaluations and checkpoints too; "average", their mean over ranks
            at `synchronize()` and `finish()`, what is not floating-point being rank 0's; "broadcast", rank 0's there.
            Ranks that have finished are in the mean.
        verify: Number of meetings, by `synchronize()` and `finish()`, between comparisons of a hash of the parameters,
            which are the same on all ranks there; a difference is a CollectiveError on every rank that names rank and
            parameter. Over an `Elastic` at every meeting. None, the default, or 0: never.
        **rounds: `quorum`, `max_staleness`, `grace`, `seed`, `on_death` and `compress`: see `PartialAllreduce`. Where
            ranks may be lost (on_death="shrink", always so over an `Elastic`) buffers are kept: to share them takes all
            ranks, and so does `verify`, but for an `Elastic`.

    Attributes:
        applied: Rounds that were applied so far.
        gradients: Number of gradients in them, of all ranks.
    """

    advice = (
        "go on with as many ranks, or save after finish(), and load the wrapped optimizer's part into that, and a "
        "rank's state['distributed']['scheduler'] into the scheduler"
    )
    alike = meets_first = True

    def __init__(
        self,
        optimizer: Optimizer,
        named_parameters: Iterable[tuple[str, Tensor]],
        *,
        comm: Any = None,
        scheduler: Any = None,
        weighted: bool = False,
        model: nn.Module | None = None,
        buffers: str = "keep",
        verify: int | None = None,
        **rounds: Unpack[RoundSettings],
    ) -> None:
        if unknown := sorted(set(rounds) - set(RoundSettings.__annotations__)):
            known = ", ".join(RoundSettings.__annotations__)
            raise TypeError(f"EagerSGD takes no {', '.join(unknown)}; of rounds it takes {known}")
        check_steps(optimizer, scheduler)
        if not isinstance(weighted, bool):
            raise TypeError(f"weighted is {weighted!r}, expected True or False")
        if isinstance(comm, Elastic) and rounds.setdefault("on_death", "shrink") != "shrink":
            raise ValueError(
                f"on_death={rounds['on_death']!r} ends all ranks with the first that dies, but those of an Elastic "
                "go on: leave it out, or give a fixed group"
            )
        check_verify(verify)
        takes_all = f"buffers={buffers!r}" if buffers != "keep" else f"{verify=}" * bool(verify)
        if takes_all and rounds.get("on_death") == "shrink" and (buffers != "keep" or not isinstance(comm, Elastic)):
            raise ValueError(f"{takes_all} takes all ranks, but on_death='shrink' goes on without some: leave one")
        super().__init__(optimizer, named_parameters, comm, model=model)
        shared = Buffers(model, buffers, self.comm, "EagerSGD")
        self.scheduler = scheduler
        self._trained = list(self.trained.values())
        self._weighted, self.applied, self.gradients, self._unscheduled = weighted, 0, 0, 0
        self._verify, self._meetings = verify, 0
        self.start_alike(f"{weighted=}, {buffers=}, {verify=}, {as_facts(optimizer, scheduler)}", model=model)
        held = buffers != "keep" and model is not None and any(buffer.numel() for buffer in model.buffers())
        self._shared = shared if held else None
        self._ended = self._closed = False
        self._met, self._known = True, settings_of(optimizer)
        self._buckets = [  # gradients of 16 bits are added up in 32: halves that are finite may add to inf
            replace(bucket, dtype=torch.promote_types(bucket.dtype, torch.float32))
            for bucket in buckets_of(self._trained)
        ]
        like = [torch.empty(bucket.numel, dtype=bucket.dtype, device=bucket.device) for bucket in self._buckets]
        self._nbytes = sum(one.nbytes for one in like)
        make = partial(PartialAllreduce, like, weighted=weighted, **rounds)
        self._elastic: ElasticRounds | None = None
        if isinstance(self.comm, Elastic):
            own, settings = weakref.proxy(self), f"{self._alike}, {sorted(rounds.items())}"
            compare = (lambda: own._refuse_unlike()) if verify else (lambda: None)
            self._elastic = ElasticRounds(own, self.comm, make, compare, settings=settings)
        else:
            self._fixed = make(self.comm)
        self.regrouped()
        self.enter()
        self._given_steps, self._dense_bytes, self._sent_before = 0, 0, self.comm.bytes_sent

    @property
    def _rounds(self) -> PartialAllreduce:
        rounds: PartialAllreduce = self._fixed if self._elastic is None else self._elastic.current
        return rounds

    @property
    def lateness(self) -> Lateness:
        """Ranks that were last, and by how much."""
        return self._rounds.lateness

    def stats(self) -> Stats:
        """Costs of training on this rank since this optimizer was made; sends no messages.

        Returns:
            Plain numbers for any logger, as `PartialAllreduce.stats` gives them, and:

            - steps: Gradients that this rank has given.
            - rounds: Rounds that were applied; gradients: those in them, of all ranks, each from the first step of the
                training on.
            - bytes_dense: Bytes that an allreduce of as many gradients would have sent at best: 2(P − 1)/P of them.
        """
        now = (self._elastic or self._rounds).stats()
        counted = {"rounds": self.applied, "gradients": self.gradients, "steps": self._given_steps}
        sent = {"bytes_sent": self.comm.bytes_sent - self._sent_before, "bytes_dense": self._dense_bytes}
        return Stats.of_group(self.comm, **{**now, **counted, **sent})

    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None, *, weight: float | None = None
    ) -> float | None:
        """Gives the gradients, and applies every round that is over. See `PartialAllreduce.allreduce`.

        Args:
            closure: Computes the loss and the gradients, as torch's optimizers take it.
            weight: Number of samples or tokens that the gradient is the mean over; given if, and only if, the optimizer
                is `weighted`.

        Returns:
            The closure's loss; None without one.

        Raises:
            TypeError: A gradient is sparse.
        """
        self.check_step(apart=True)
        weight = self._checked(weight)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.admit()
        self.check_exchange()
        gradients = [self._dense(name, p) for name, p in self.trained.items()]
        self._given_steps += 1
        self._dense_bytes += 2 * self._nbytes * (self.comm.size - 1) // self.comm.size
        self._tell_changes()
        self._apply(self._rounds.allreduce([bucket.gather(gradients) for bucket in self._buckets], weight=weight))
        return loss

    def synchronize(self) -> None:
        """Meets all ranks that have more steps, each after as many as it likes.

        Then parameters are the same on all, and no gradient is under way. Call it for evaluation, before a checkpoint,
        to set rates by hand, alike on all, and before any other collective: a round may wait for a rank that waits
        there. Settings that differ afterwards are a CollectiveError on every rank in one of the next rounds, which
        names two ranks and what they have changed; a rank that has finished changes nothing.
        """
        self._meet(finished=False)

    def finish(self) -> None:
        """Ends this rank's steps: applies the rest of the rounds until no rank has any."""
        while (self._shared is not None or self._elastic is not None or self._verify) and not self._ended:
            self._ended = self._meet(finished=True)
        self._tell_changes()
        self._apply(self._rounds.finish())
        self.end_steps()

    def close(self) -> None:
        """Frees what it holds, with all other ranks; after `finish()`, else it no longer applies the others' rounds."""
        self._rounds.close()
        self._closed = True

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state and, as "distributed", what is under way; take it after `synchronize()`.

        That is this rank's gradients that are in no round yet, rounds that were not applied yet, where the rounds
        stand, and the scheduler's state. It differs between ranks: each saves its own. Over an `Elastic`
        it is good for any rank of any number of them, and must be taken after `synchronize()`.
        """
        rounds = self._rounds.state_dict()
        idle = not rounds["deposits"][0]["count"] and not rounds["results"] and self._met
        own = {
            "rounds": rounds,
            "met": self._elastic is not None and idle,
            "applied": self.applied,
            "gradients": self.gradients,
            "unscheduled": self._unscheduled,
            "settings": {"weighted": self._weighted, "scheduler": _name(self.scheduler)},
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
        }
        self.end_steps()
        return self.state_with(own, stepped=self.applied > 0)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on where this rank's `state_dict`, or `gathered_state_dict`, was taken.

        Every rank calls it, before its first step.

        Args:
            state_dict: Result of `state_dict` on this rank, or of `gathered_state_dict` on rank 0.

        Raises:
            TypeError: It is no state, such as None or a list.
            ValueError: The state is of another rank or another number of them.
            CollectiveError: Ranks give states of different rounds.
        """
        if self._elastic is None:
            self._rounds.refuse_begun("load_state_dict()")
        with self.loading(state_dict):
            self._load(state_dict)

    def _load(self, state_dict: Mapping[str, Any]) -> None:
        needs = ("rounds", "applied", "gradients", "settings", "scheduler")
        wrapped, own = self.parts_of_state(state_dict, needs, anyones="met")
        for name, now in (("weighted", self._weighted), ("scheduler", _name(self.scheduler))):
            if (then := own["settings"][name]) != now:
                raise ValueError(f"the state is of an EagerSGD with {name}={then}, this one has {name}={now}")
        if self._elastic is not None and not own.get("met"):
            raise ValueError(
                "the state was not taken over an Elastic after synchronize(): take it there, before a step"
            )
        own = {"unscheduled": 0, **own}  # before schedules went by gradients it was not there
        check_like(own, {"applied": 0, "gradients": 0, "unscheduled": 0, "rounds": {"machine": {"round": 0}}}, "")
        load_into(self.optimizer, wrapped)
        self.load_shared_state(own)
        self._met = True
        if self._elastic is None:
            self._rounds.load_state_dict(own["rounds"])  # last: from here on others go on
        else:
            place = self.comm.rank, self.comm.size
            is_own = (own.get("rank"), own.get("world_size")) == place
            self._elastic.begin_anew(own["rounds"]["machine"]["round"], own["rounds"]["residuals"] if is_own else None)
            self.regrouped()

    def shared_state(self) -> dict[str, Any]:
        scheduler = None if self.scheduler is None else self.scheduler.state_dict()
        counts = dict(zip(COUNTS, (self.applied, self.gradients, self._unscheduled), strict=True))
        return {**counts, "scheduler": scheduler, "known": self._known}

    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        self.applied, self.gradients, self._unscheduled = map(state.__getitem__, COUNTS)
        self._known = state.get("known") or settings_of(self.optimizer)  # a checkpoint has none
        if self.scheduler is not None:
            load_into(self.scheduler, state["scheduler"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            if error is not None:
                self.end_steps()
            elif not self._closed:
                self.finish()
        except BaseException as failed:
            self._rounds.__exit__(type(failed), failed, None)
            raise
        self._rounds.__exit__(kind, error, trace)

    def _apply(self, results: Iterable[PartialResult]) -> None:
        for result in results:
            if result.nonfinite:
                raise CollectiveError(
                    f"gradients of ranks {list(result.nonfinite)} are not finite in round {result.round}, which was "
                    "not applied: clip gradients, lower the learning rate, or go back to a checkpoint"
                )
            self.gradients += result.deposits
            self._unscheduled += result.deposits
            self._step(result)

    def regrouped(self) -> None:
        """Has the others, and newcomers, meet in new rounds."""
        if self._elastic is not None:
            self._elastic.agree()

    def part(self) -> None:
        """Leaves the rounds."""
        if self._elastic is not None:
            self._elastic.leave()

    def _meet(self, *, finished: bool) -> bool:
        """Meets all ranks that have steps, and all others too where buffers are shared; whether all have finished."""
        self._synchronize()
        self.end_steps()
        if self._elastic is not None:
            over = self._elastic.met(finished=finished, drains=not finished)
            while not (over or finished):  # others were only called
                self._synchronize()
                over = self._elastic.met(drains=True)
            return over
        if self._shared is None and not self._verify:
            return finished
        self._meetings += 1
        if self._verify and self._meetings % self._verify == 0:
            self._refuse_unlike()
        if self._shared is not None:
            self._shared.at_boundary()
        counts = schedules.allreduce(torch.tensor([not finished], device="cpu").long(), self.comm.rank, self.comm.size)
        return not run(counts, self.comm, facts="EagerSGD: who has finished")

    def _synchronize(self) -> None:
        """Applies the rounds up to a common one; changes that were told in them are known to all from then on."""
        self.admit()
        told = self._met
        self._tell_changes()
        self._apply(self._rounds.synchronize())
        if told and self._met:
            self._known = settings_of(self.optimizer)
        self._met = True

    def _refuse_unlike(self) -> None:
        refuse_unlike(self.named, self.comm, when=f"after {self.applied} rounds")

    def _checked(self, weight: float | None) -> float:
        if weight is not None and not self._weighted:
            raise ValueError(f"step(weight={weight}), but means are plain: make the EagerSGD with weighted=True")
        if weight is None and self._weighted:
            raise ValueError("step() of a weighted EagerSGD: give the step's weight, such as step(weight=len(batch))")
        return 1.0 if weight is None else weight

    def _dense(self, name: str, p: Tensor) -> Tensor | None:
        if p.grad is not None and p.grad.layout != torch.strided:
            raise TypeError(f"the gradient of {name!r} has layout {p.grad.layout}: embeddings need sparse=False")
        return p.grad

    def _step(self, result: PartialResult) -> None:
        if not self._met and self.comm.size > 1:
            refuse_changed(self.optimizer, self._known)
        if result.weight or not self._weighted:  # else, on all ranks, there is nothing to take a mean of
            self._put(result)
            self.optimizer.step()
            self.applied += 1
        while self.scheduler is not None and self._unscheduled >= len(result.members):
            self._unscheduled -= len(result.members)
            self.scheduler.step()
        self._met, self._known = False, settings_of(self.optimizer)

    def _tell_changes(self) -> None:
        """Tells all others what was changed by hand since all have met, before a round is applied with it."""
        if self._met:
            self._rounds.changes = changes(self.optimizer, self._known)

    def _put(self, result: PartialResult) -> None:
        """Puts the mean into p.grad, which is made where there is none."""
        for p in self._trained:
            if p.grad is None:
                p.grad = torch.empty_like(p)
        gradients = [p.grad for p in self._trained if p.grad is not None]
        divisor = result.weight if self._weighted else len(result.members)
        totals = [result.total] if isinstance(result.total, Tensor) else result.total
        for total, bucket in zip(totals, self._buckets, strict=True):
            bucket.scatter(total / divisor, gradients)


def _name(scheduler: Any) -> str | None:
    return None if scheduler is None else type(scheduler).__name__
