"""`PeriodicAveraging`, the interface of the family: steps, boundaries, the end, the model, checkpoints."""

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Self, Unpack

import torch
from communicators import Stats, as_communicator, schedules
from replicas import Buffers, Wrapping, load_into, restored
from torch import nn
from torch.optim import Optimizer

from local_sgd.driver import Block, Driver, rates_of
from local_sgd.parts import by_name, digest
from local_sgd.rule import Rule, check_rule
from local_sgd.settings import Every, Settings, check_settings, number


class PeriodicAveraging(Wrapping):
    """Wraps an optimizer: its steps are local, and after every τ of them ranks exchange a mean of their models.

        optimizer = LocalSGD(torch.optim.SGD(model.parameters(), lr=0.1), sync_every=4)
        for ...:
            loss.backward()
            optimizer.step(); optimizer.zero_grad(); optimizer.average()
        optimizer.finish()

    x is a rank's model and x̄ the mean over ranks; a boundary comes after every τ-th `average`. `LocalSGD` and its
    like are this class with a rule; a rule of one's own is a `Rule`.

    Parameters of 16 bits are averaged in 32; the rounding error stays with the rank that rounds.
    Parameters that are frozen now (requires_grad False) are left out; freezing, unfreezing or adding some later is an
    error: call `drain`, change them, and make another optimizer.
    A warning says so where `model` is or holds a DDP module among the same ranks, because that exchanges every gradient
    anyway; DDP round `model` is not seen.

    Args:
        optimizer: Any optimizer over the live parameters; this object shares its param_groups, state and defaults.
        rule: State and equation of the algorithm.
        sync_every: τ, or a function that gives it from the number of steps before the block, such as a warm-up:
            `lambda step: 1 if step < 1000 else 16`. Ranks may have other values: their blocks are exchanged in order.
        driver: When ranks exchange, and which parameters; default: all of them at every boundary.
        **settings: See Attributes.

    Attributes:
        comm: See `communicators.as_communicator`; its `timeout` is how long a boundary waits for a late rank.
        model: Gives the parameters' names in errors, and has the `buffers`.
        buffers: Policy for the model's buffers, such as BatchNorm's: "keep" (default), every rank its own until `drain`
            or `finish` averages them; "average" at boundaries, with rank 0's where they are not floating-point;
            "broadcast" rank 0's. The last two wait for a small exchange at every boundary.
        inner_state: Policy for the wrapped optimizer's state: "keep" (default), every rank its own; "average" at
            boundaries; "reset" there.
        weighted: Whether `average(weight)` is given a weight, such as the number of samples or tokens of the step;
            means are by the sums of weights over blocks. Default: False.
        broadcast: Whether rank 0's parameters, and buffers of `model`, are copied to all ranks now, the default. False:
            ranks compare a hash of their parameters, and it is an error where they differ.
        native: Whether to use the transport's own allreduce: worlds then agree within rounding, not bit for bit.
            Default: False.
        shares: Share of every vector that each rank sums, for ranks with unequal links, see
            `communicators.shares_by_rate`; of the models alone, not of buffers and inner states. The model has the same
            bits whatever they are, and within rounding those without. Default: a sum in halves, or a ring.
        bucket_bytes: Most bytes of an exchanged vector, of one group, dtype and device; a larger tensor has its own.
            Vectors are under way at once. Default: 25 MiB, as DDP's; no limit where `compress` is an object that
            selects, since it does so in each vector.
        anchor_device: Device of anchors, momenta and means, such as "cpu"; default: the parameters'.
        verify: Number of boundaries between comparisons of a hash of what ranks share there: the rule's anchors and
            momenta, or without such the mean. The end of training compares the model. In between every rank hashes its
            own parameters after `average()` and before the next step, where nobody is to write into them: two passes
            over them in each step, whatever the number is. A difference or a change is a CollectiveError on every rank
            that names rank, parameter and step or boundary. None, the default: never. Unless it is 0, ranks compare a
            hash of the parameters at the first boundary.

    Raises:
        CollectiveError: Alike on every rank: ranks differ in algorithm, settings or parameters, or later a mean is not
            finite.
    """

    advice = (
        "call drain() before state_dict(), and any rank's state and model may be loaded at any number of ranks; or "
        "start from a plain checkpoint of the model, made inside averaged_model(), with a new optimizer"
    )
    settles = "drain()"
    instead_of_ddp = "; DDP inside each node alone, by process_group= of its ranks, is as it should be"
    instead_of_shards = "to average them shard by shard is not supported: give whole parameters, as a plain module has"

    def __init__(
        self,
        optimizer: Optimizer,
        rule: Rule,
        *,
        sync_every: Every = 4,
        driver: Driver | None = None,
        **settings: Unpack[Settings],
    ) -> None:
        check_rule(rule)
        what = type(rule if type(self) is PeriodicAveraging else self).__name__
        check_settings(settings, what, type(self))
        self.rule, self._driver, self._block = rule, driver or Driver(), Block(sync_every)
        self._model = model = settings.get("model")
        super().__init__(optimizer, None, settings.get("comm"), model=model, what=what)
        buffers = Buffers(model, settings.get("buffers", "keep"), self.comm, what)
        self._weighted = bool(settings.get("weighted"))
        if rule.needs_rate and (lacking := [g for g, group in enumerate(optimizer.param_groups) if "lr" not in group]):
            raise ValueError(f"{what} counts in learning rates, but parameter groups {lacking} have no 'lr'")
        self._refuse_misfits(native=bool(settings.get("native")), shares=settings.get("shares"))
        rule.fit(self.comm.first_size)
        policies = {name: settings.get(name, "keep") for name in ("buffers", "inner_state")}
        switches = {name: bool(settings.get(name)) for name in ("weighted", "native")}
        self._said = {**rule.shared(), **policies, **switches, **self._driver.facts()}
        agreed = {**self._said, **{name: settings.get(name) for name in ("bucket_bytes", "verify")}}
        agreed |= {"shares": [float(share) for share in settings.get("shares") or ()]}
        agreed |= {name: "default" for name in rule.defaults if name in agreed}  # newcomers have another one
        text = ", ".join(f"{name}={value!r}" for name, value in agreed.items())
        self.meets_first = self._driver.meets
        self.start_alike(text, model=model, broadcast=settings.get("broadcast", True))
        self._driver.begin(self, rule, self._block, buffers, settings)
        optimizer.register_step_pre_hook(partial(_departs, weakref.ref(self)))
        self._sent_before, self._dense = self._sent, 0
        self._nbytes = sum(p.numel() * p.element_size() for p in self.trained.values())
        self._showing, self._unseen, self._warned = False, 0, False
        self._expected: int | None = None
        self._driver.enter()
        self.enter()

    @property
    def sync_every(self) -> Every:
        """τ; a new value counts from the next block on."""
        return self._block.every

    @sync_every.setter
    def sync_every(self, every: Every) -> None:
        if self._driver.two_levels:
            raise ValueError("sync_every of two levels stays as it is: drain(), and make another optimizer")
        self._block.every = Block(every).every

    @property
    def hidden_fraction(self) -> float | None:
        """Share of the exchanges' seconds so far in which this rank did not wait; None before the first exchange.

        1 where every exchange is over before its mean is applied: at the next boundary, or in `StreamingDiLoCo` `delay`
        steps later. 0 where it is waited for at once: by algorithms that do not overlap, and with a delay of 0.
        """
        stats = self.stats()
        return stats["seconds_hidden"] / stats["seconds_exchanging"] if stats["seconds_exchanging"] > 0 else None

    def stats(self) -> Stats:
        """Cost and savings of training on this rank since this optimizer was made; exchanges nothing.

        Returns:
            Plain numbers for any logger, as `communicators.Stats` describes them, "boundaries", their number so far
            and, with `compress`, "residual_norm", the 2-norm of the residuals, which takes one pass over them. Bytes
            are those over `comm`, also by others that use it, and over the small group of two levels.
        """
        block = self._block
        sent = {"bytes_sent": self._sent - self._sent_before, "bytes_dense": self._dense}
        counted = {"steps": block.steps, "boundaries": block.boundaries, **sent, **self._driver.stats()}
        return Stats.of_group(self.comm, **counted)

    def __repr__(self) -> str:
        """Settings, and the wrapped optimizer's."""
        settings = {"sync_every": self._block.every, **{name: value for name, value in self._said.items() if value}}
        said = [f"{name}={value!r}" for name, value in settings.items()]
        return f"{self.what}({', '.join(said)}, rank {self.comm.rank} of {self.comm.size}, {self.optimizer!r})"

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Takes the wrapped optimizer's step, on this rank alone."""
        self._refuse_shown("step()")
        self.check_step(apart=True)
        self.admit()
        self._refuse_other_parameters()
        apart, unseen = self._driver.nearest.length // len(self._driver.fragments), self._unseen + 1
        if unseen >= max(2, apart) and not self._warned:
            self._warned = True  # once, where an exchange would have been
            warnings.warn(
                f"{unseen} steps of {self.what} since the last average(), which counts them: ranks exchange "
                "nothing, and go apart. Call optimizer.average() after every optimizer.step()",
                stacklevel=3,
            )
        loss = self._take_step(closure)
        self._unseen = unseen  # not where it failed, so that its state can be saved
        return loss

    def _take_step(self, closure: Callable[[], float] | None) -> float | None:
        return self.optimizer.step(closure) if closure is not None else self.optimizer.step()

    def average(self, weight: float | None = None) -> None:
        """Counts a step; exchanges at a boundary. Call it after every step, also after one that a GradScaler skipped.

        Args:
            weight: Weight of the step, such as its number of samples; given if, and only if, means are `weighted`.
        """
        self._refuse_shown("average()")
        self.admit()
        if not self._driver.meets:
            self.comm.catch_up()
        self._depart()
        self._unseen, weight, size = 0, self._checked(weight), self.comm.size
        self._dense += 2 * self._nbytes * (size - 1) // size  # by the ranks of this very step
        self._driver.count(weight)
        if self._driver.at_rest is not None:
            self._driver.at_rest.begin()

    def drain(self) -> None:
        """Ends the block and any exchange under way; every rank then holds the model, bit for bit, and buffers.

        Of a block that no rank has completed the mean over ranks is the model, without a step of momentum over blocks.

        All ranks call it at the same point. A rank that has fewer blocks than others calls `finish`.
        """
        self._end(most=1)

    def finish(self) -> None:
        """Ends this rank's steps: takes part in the others' boundaries until all have finished; then acts as `drain`.

        Ranks may come with different numbers of steps. After its last block a rank that has finished is left out of the
        means, and follows the others. Training may go on afterwards.
        """
        self._end(most=None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        """Calls `finish`, unless an exception leaves the block, which other ranks may have to be told."""
        if error is None:
            self.finish()
        else:
            self._driver.give_up(error)
        self.end_steps()

    def wait(self) -> None:
        """Waits for the exchange under way, so that it can be counted; it is applied at the next boundary as ever."""
        for fragment in self._driver.fragments:
            fragment.averaging.wait()

    @contextmanager
    def averaged_model(self, *, comm: Any = None) -> Iterator[nn.Module | None]:
        """Puts the algorithm's model into the parameters inside the block; afterwards they are this rank's own again.

            with optimizer.averaged_model():
                evaluate(model); torch.save(model.state_dict(), path)

        Every rank calls it, between the same boundaries; training goes on with the same bits. Buffers of `model` are
        averaged inside, or rank 0's with buffers="broadcast".

        Args:
            comm: Another communicator of the same ranks, such as one that counts bytes apart from training's.

        Yields:
            `model`.
        """
        self._refuse_shown("averaged_model()")
        comm = self.comm if comm is None else as_communicator(comm)
        if self.comm.elastic:
            self.wait()  # as all ranks do, before any other exchange
        parts, models = self._driver.parts, self._driver.models(comm)
        with self._driver.buffers.shared(comm), restored([p for part in parts for p in part.tensors]):
            for part, model in zip(parts, models, strict=True):
                part.bucket.scatter(model, part.tensors)  # for a while only: rounding errors are forgotten
            self._showing = True
            try:
                yield self._model
            finally:
                self._showing = False
                self.end_steps()

    def state_dict(self) -> dict[str, Any]:
        """State of the wrapped optimizer and, as "distributed", all else; each rank saves its own, and its own model.

        An exchange under way is waited for and stored, not applied; in an elastic group all ranks call it then, at the
        same point, because they take its mean together. Tensors are references; the state can be loaded by
        torch.load(weights_only=True).

        Raises:
            RuntimeError: After a step that `average` has not counted, or inside `averaged_model`.
        """
        self._refuse_shown("state_dict()")
        self._refuse_unseen("save")
        self._refuse_other_parameters()
        own = self._driver.state_dict()
        self.end_steps()
        return self.state_with(own, stepped=self._block.steps > 0)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on where this rank's `state_dict` or `gathered_state_dict` was taken: the same bits, also in mid-block.

        Load the model's parameters from this rank's own model, after the optimizer was made and before its first step,
        which checks them. A state taken after `drain` or `finish` is alike on all ranks, but for the wrapped
        optimizer's part and residuals of `compress`: any rank's may be loaded on every rank, of any number of ranks,
        and residuals begin at zero on another rank. Settings such as `sync_every` and `buffers` are this optimizer's
        own: a state goes on under others, too. Those of the wrapped and of an outer optimizer, such as rates, are the
        state's, as torch loads them. The next boundary checks that all ranks have loaded states of the same boundary,
        and raises a CollectiveError otherwise.

        Args:
            state_dict: Result of `state_dict` on this rank, or of `gathered_state_dict` on rank 0.

        Raises:
            TypeError: It is no state, such as None or a list.
            ValueError: It is of another algorithm, of other parameters and, unless it was drained, of another rank or
                number of ranks; or, where a compressor keeps residuals, of another cut (`bucket_bytes`, fragments).
        """
        self._refuse_shown("load_state_dict()")
        self.wait()  # an error of what is under way is raised before anything is changed
        with self.loading(state_dict):
            wrapped, own = self.parts_of_state(state_dict, ("algorithm",), anyones="drained")
            self._driver.check(own)
            load_into(self.optimizer, wrapped)
            self._expected = own["parameters"]
            self._driver.load_state_dict(own)
            self._unseen = 0

    def gathered_state_dict(self) -> dict[str, Any]:
        self._refuse_shown("gathered_state_dict()")
        self.wait()
        return super().gathered_state_dict()

    gathered_state_dict.__doc__ = Wrapping.gathered_state_dict.__doc__

    def regrouped(self) -> None:
        self._driver.regrouped()

    def part(self) -> None:
        self._driver.part()

    def shared_state(self) -> dict[str, Any]:
        ranks = [fragment.ranks for fragment in self._driver.fragments]
        before = by_name(self._driver.parts, self._driver.before) if self._driver.before else {}
        told = {"agreed": self._driver.agreed, "ranks": ranks, "before": before}
        own = {**self._driver.state_dict(waits=False), **told}
        return {name: held for name, held in own.items() if name != "residuals"}

    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        if state["agreed"] != self._driver.agreed:
            self.comm.close()
            raise ValueError(
                f"this rank has come to a training with other settings: {self.what}{state['agreed']}, and this one has "
                f"{self.what}{self._driver.agreed}; start it as those who train were started"
            )
        self._driver.join(state)

    @property
    def _sent(self) -> int:
        return sum(comm.bytes_sent for comm in self._driver.comms)

    def _refuse_misfits(self, *, native: bool, shares: Sequence[float] | None) -> None:
        """Raises ValueError for settings that do not go together, or not where a rank may die."""
        driver, compress = self._driver, self._driver.sums
        if native and (self.rule.overlaps or driver.by_fragment):
            raise ValueError(f"native=True waits for the transport, but {self.what} goes on meanwhile: leave it out")
        if native and compress:
            raise ValueError(f"native=True is the transport's sum, and compress={compress!r} another: leave one out")
        if shares is not None:
            schedules.check_shares(shares, self.comm.size)
            if self.comm.elastic:
                raise ValueError(f"{self.what} with shares over an Elastic, whose ranks come and go: leave them out")
            if compress:
                raise ValueError(f"shares are of a sum in full precision, and {compress!r} has another: leave one out")
        reason = "the transport's sum fails for good when a rank dies: leave it out" if native else driver.inelastic
        if self.comm.elastic and reason:
            asked = "native=True" if native else type(driver).__name__
            raise ValueError(f"{self.what} with {asked} over an Elastic: {reason}")

    def _checked(self, weight: float | None) -> float:
        if weight is None and not self._weighted:
            return 1.0
        if not self._weighted:
            raise ValueError(f"average(weight={weight}), but means are plain: make the {self.what} with weighted=True")
        if weight is None:
            raise ValueError(f"average() of a weighted {self.what}: give the step's weight, such as len(batch)")
        if number("weight", weight) < 0:
            raise ValueError(f"weight is {weight}, expected 0 or more")
        return float(weight)

    def _refuse_shown(self, what: str) -> None:
        if self._showing:
            raise RuntimeError(
                f"{what} inside averaged_model(), where the parameters are not this rank's: leave it first"
            )

    def _refuse_unseen(self, then: str) -> None:
        if self._unseen:
            since = f"{self._unseen} steps since the last average()"
            raise RuntimeError(f"{since}: call that after every step, then {then}")

    def _end(self, *, most: int | None) -> None:
        self._refuse_shown("drain() and finish()")
        self._refuse_unseen("end")
        if most is None or self._driver.meets:
            self.admit()
        with torch.inference_mode(False), torch.no_grad():  # steps may come after an evaluation that calls it
            self._depart()
            self._driver.end(most=most)

    def _depart(self) -> None:
        """Leaves the rest between two steps, or the drained state."""
        if self._driver.at_rest is not None:
            self._driver.at_rest.end(self._block.steps)
        self._driver.depart()

    def _refuse_other_parameters(self) -> None:
        """Checks the parameters the first time after a state was loaded."""
        if self._expected is not None and self._expected != digest(self.trained):
            raise RuntimeError(
                "the parameters are not those that the loaded state was saved with: load this rank's own "
                "model.state_dict(), saved at the same point, after the optimizer was made (which copies rank 0's)"
            )
        self._expected = None


def _departs(wrapper: weakref.ref[PeriodicAveraging], *_: Any) -> None:
    """Runs before a step of the wrapped optimizer, whoever takes it; keeps no wrapper alive that was replaced."""
    living = wrapper()
    if living is not None:
        living._depart()
        living._block.rates = rates_of(living.param_groups) if living.rule.needs_rate else []
