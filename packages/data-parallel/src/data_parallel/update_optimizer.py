"""Updates of an optimizer, which it makes of this rank's own gradients, exchanged in place of the gradients.

An adaptive optimizer divides by the size of its input, which comes in bursts from a sparse exchange: an entry that is
sent every T steps brings T gradients at once, its second moment is T times that of dense gradients, and its steps are
√T times too short. So the optimizer runs before the selection, on the rank's own dense gradients, and its updates of
the parameters are selected from, with error feedback (as in SparseLoCo, Sarfi et al. 2025, with an
exchange after every step, and without its decay of the residuals, which would lose a part of them).
"""

import copy
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self, Unpack

import torch
from replicas import STATE_KEY
from sparse_compress import all_finite
from torch import Tensor, nn
from torch.optim import Optimizer

from data_parallel.adam_step_correction import AdamStepCorrection, ahead_by, without_looks
from data_parallel.lookahead import ErrorLookahead, FollowedModule
from data_parallel.means import Means
from data_parallel.optimizer import ExchangingOptimizer
from data_parallel.optimizer_watch import too_short
from data_parallel.rates import ByRates
from data_parallel.settings import ExchangeSettings, Settings, check_count, scheduled

ADAMS_BETA1, WAITING_BETA1 = 0.9, 0.5
LEAST_CYCLED = 0.85  # of OneCycleLR
AGAIN = (
    "Adam's β₁ is {found:g}, where for_model had set {beta1:g}: training lags behind, because what waits acts like "
    "momentum. A state that was loaded, OneCycleLR or CyclicLR has set it. Set the groups' betas again, give these "
    "cycle_momentum=False, or give for_model beta1=None"
)
AVERAGES = (
    "ASGD averages parameters, ax in its state. Under an UpdateOptimizer these are of a rank's own steps, others on "
    "every rank: if you use them, take a DistributedOptimizer, whose ranks stay equal"
)
TINY = 256
"""Elements: biases and norms, not matrices."""


class UpdateOptimizer(ExchangingOptimizer):
    """Wraps an optimizer, Adam or almost any other, so that all ranks take the mean of what each one's would do.

        optimizer = torch.optim.AdamW(model.parameters(), betas=(0.5, 0.999))
        optimizer = UpdateOptimizer(optimizer, model.named_parameters(), density=0.01)
        with optimizer.ahead():
            loss.backward()
        optimizer.step()

    At construction all ranks get rank 0's parameters (not its buffers). Then, on every rank:

        Δ ← what the wrapped optimizer.step() adds to p, with this rank's own gradients
        acc ← residual + Δ;  s ← compressor(acc);  residual ← acc − s                          (`ErrorFeedback`)
        total, dropped ← sparse_allreduce(s);  residual ← residual + dropped;  p ← p + total / P

    Adaptive optimizers learn badly from the few gradients that a `DistributedOptimizer` leaves them; here they see all
    of a rank's own. Their moments are noisier than those of the mean gradient: Adam, AdamW, NAdam and RMSprop take
    longer steps to correct for that; a warning names others that divide by the size of gradients. Waiting in residuals
    acts like momentum, and momentum prolongs the wait: take betas=(0.5, 0.999). The step comes before the exchange, and
    p.grad stays as it was: clip it as in training on one device, or by clip_norm. Groups with different rates have
    separate selections: rates may change from step to step, in the same way on all ranks. Forward and backward belong
    inside `with optimizer.ahead():`, see there.

    Args:
        optimizer: Built over the live parameters; this object shares its param_groups, state and defaults, so
            learning-rate schedulers take either. Its step() is called without a closure, which this class's step calls
            once: LBFGS needs it more often. It must step all parameters on every rank, which a ZeroRedundancyOptimizer
            does not, and keep no parameters in its state, as ASGD and schedule-free optimizers do: what they average is
            of a rank's own steps, and another model on every rank. Wrap these in a DistributedOptimizer.
        named_parameters: Those of the whole model. Frozen ones (requires_grad False, now) are left out of the exchange.
            Freezing, unfreezing or adding some later is an error of the next step: make a new UpdateOptimizer.
            ValueError if none is left.
        comm: See `communicators.as_communicator`; its `timeout` is how long a step waits for a late rank. With an
            `Elastic`, a step that a death breaks is done again with the same gradients among those left, and newcomers
            come at its end, with an empty residual and another rank's moments; memory is as with nonfinite="skip",
            and with clip_norm also a copy of the gradients during step().
        bucket_bytes: Size of the buckets for selection and exchange; default: all groups of similar rates at once.
        nonfinite: "raise": a NaN or inf in any rank's gradient or update is a CollectiveError, on every rank, that
            names rank and parameter; no parameter changes, but what residuals took in that step is lost, and moments
            may have taken it. "skip": every rank skips the step, counts it in `skipped`, and keeps residuals and the
            wrapped optimizer's state as they were, bit for bit, for twice the residuals' memory and a copy of the state
            during step(); p.grad stays. It is what torch's GradScaler needs.
        settings: Keywords of `ExchangeSettings`: density, algorithm, clip_norm, …; not momentum. The algorithm must be
            one that selects.

    The module should not be in DDP: DDP would first exchange dense gradients in vain, and a warning says so.
    """

    _followed: FollowedModule | None = None

    def __init__(
        self,
        optimizer: Optimizer,
        named_parameters: Iterable[tuple[str, Tensor]],
        *,
        comm: Any = None,
        bucket_bytes: int | None = None,
        nonfinite: str = "raise",
        **settings: Unpack[ExchangeSettings],
    ) -> None:
        checked = Settings.of(UpdateOptimizer, settings, nonfinite=nonfinite)
        nbytes = check_count("bucket_bytes", bucket_bytes, "bytes")
        if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__):
            raise TypeError(
                "a ZeroRedundancyOptimizer takes steps of a share of the parameters on each rank, but updates are sent "
                "of all: wrap the optimizer that it has, or exchange gradients by a DistributedOptimizer around it"
            )
        if checked.momentum:
            raise ValueError(f"momentum={checked.momentum} belongs into the wrapped optimizer, whose updates are sent")
        if not checked.may_select:
            raise ValueError(
                f"{checked.algorithm!r} selects nothing, and an UpdateOptimizer is for algorithms that select: take a "
                f"DistributedOptimizer"
            )
        super().__init__(optimizer, named_parameters, comm, checked, sends="updates")
        if (said := too_short(optimizer, self.comm.size)) is not None:
            warnings.warn(said, stacklevel=2)
        if isinstance(optimizer, torch.optim.ASGD) and self.comm.size > 1:
            warnings.warn(AVERAGES, stacklevel=2)
        self._step_correction = AdamStepCorrection(optimizer, self.comm)
        self._told_of_ddp = False
        self._lowered: dict[int, float] = {}  # Adam's β₁ by group, where for_model has set it, until it is another
        ranks = self.comm  # of which a cycle through this object would keep it, and what follows the model, alive
        self._lookahead = ErrorLookahead(self._sent, self._exchange, lambda: ahead_by(optimizer, ranks.size))
        self._rates = ByRates(optimizer, self._trained, nbytes)
        self._open()
        self.start_alike(f"{self._exchange.facts()}, {bucket_bytes=}{self._rates.facts}")
        self.enter()

    @classmethod
    def for_model(
        cls,
        optimizer: Optimizer,
        model: nn.Module,
        *,
        steps: int | None = None,
        density: float | Callable[[int], float] | None = None,
        beta1: float | None = WAITING_BETA1,
        **settings: Any,
    ) -> Self:
        """Wraps the optimizer of a model in the recommended settings; the training loop stays as it is.

            optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
            optimizer = UpdateOptimizer.for_model(optimizer, model, steps=10_000)

        The model's own forward in training enters `ahead`, and `step` leaves it. So do its forward in evaluation or
        under no_grad, its `state_dict` and `load_state_dict`; but not a forward under no_grad before the backward of
        one in training, as of a reference in the same loss. In between, parameters that are read elsewise are this
        rank's own. Call the model, not its parts: a forward past it is told of by a warning. With torch.compile's
        fullgraph=True, give the compiled module.

        Args:
            optimizer: See the class.
            model: Module whose parameters the optimizer has, not in DDP.
            steps: Steps of the whole training, of which the warm-up is a share: see `WarmUp.recommended`; default
                1,000, that is 100 dense steps at 1 %.
            density: Share that is sent after the warm-up, or a schedule in place of it; default that of a `compressor`,
                or 0.01.
            beta1: Replaces Adam's first moment where that is 0.9, its default, or a OneCycleLR has it already, because
                waiting in residuals acts like momentum; None leaves it.
            **settings: Other arguments of the class; dense_below is 256 here.

        Returns:
            The wrapped optimizer.

        Raises:
            TypeError: The model is no module.
            ValueError: beta1 is not in [0, 1).
        """
        if not isinstance(model, nn.Module):
            kind = type(model).__name__
            raise TypeError(f"model is {kind}, expected the torch.nn.Module itself, whose forward is followed")
        if beta1 is not None and not (isinstance(beta1, (int, float)) and 0 <= beta1 < 1):
            raise ValueError(f"beta1 is {beta1!r}, expected a number from 0 on and below 1, or None")
        exchange = {name: value for name, value in settings.items() if name in ExchangeSettings.__annotations__}
        tiny = TINY if Settings.of(cls, exchange).may_select else 0
        density = scheduled(density, steps, settings.get("compressor"))
        given: dict[str, Any] = {"density": density, "dense_below": tiny, **settings}
        made = cls(optimizer, model.named_parameters(), **given)
        made.follow(model)  # what is refused changes nothing
        for group in optimizer.param_groups if beta1 is not None else ():
            found, cycled = group.get("betas", (0.0,))[0], {"base_momentum", "max_momentum"} & group.keys()
            if found == ADAMS_BETA1 or (cycled and found >= LEAST_CYCLED):
                group["betas"] = (beta1, *group["betas"][1:])
                group.update({name: min(group[name], beta1) for name in cycled})
        if beta1 is not None and beta1 < LEAST_CYCLED:
            has = [group.get("betas", (0.0,))[0] == beta1 for group in optimizer.param_groups]
            made._lowered = {position: beta1 for position, lowered in enumerate(has) if lowered}
        return made

    @property
    def is_ahead(self) -> bool:
        """Whether this is inside `ahead`."""
        return self._lookahead.now

    def follow(self, model: nn.Module) -> None:
        """Has the model's own forward in training enter `ahead` from now on, as `for_model` does; once is enough.

        Args:
            model: Module whose parameters these are.
        """
        if self._followed is None:
            owner = weakref.ref(self)
            self._followed = FollowedModule(model, self._lookahead, lambda: (own := owner()) and not own.overtaken)

    def unfollow(self) -> None:
        """Ends what `follow` began, where another optimizer trains the model from now on.

        A wrapper of these packages that is made of the same parameters does that itself; none of torch's does.
        """
        followed, self._followed = self._followed, None
        if followed is not None:
            followed.close()
            followed.leave()

    def leave_ahead(self) -> None:
        """Ends what the forward of a followed model has entered, as `step` does: between two backwards of one step.

        Another optimizer's step ends it too, once a backward has been through this model.
        """
        if self._followed is not None:
            self._followed.leave()

    def ahead(self) -> AbstractContextManager[None]:
        """Context in which parameters are this rank's own: those that all ranks have in common + its residuals.

            with optimizer.ahead():
                loss(model(inputs)).backward()
            optimizer.step()

        Residuals are scaled by 1/P with Adam and its like, and by 1 with SGD (`ErrorLookahead`). So gradients reckon
        with updates that wait. Forward and all of backward belong inside, evaluation does not: outside, parameters are
        the same on all ranks, bit for bit. `step(closure)` does this itself. From the forward of a model that is
        followed until `step` or `leave_ahead` it is there already, and neither begins nor ends anything.

        Raises:
            RuntimeError: Inside another `ahead()`. At the end: a parameter was written to inside, which is undone.
        """
        followed = self._followed is not None and self._followed.inside
        return nullcontext() if followed else self._lookahead.for_gradients()

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state and, as "distributed", this rank's residuals of updates by parameter.

        Another one on every rank: each saves its own. References; loadable by torch.load(weights_only=True).

        Raises:
            RuntimeError: Inside `ahead`.
        """
        self._refuse_mid_step("state_dict()")
        self._cut_by_rates()  # as the next step would
        state = super().state_dict()
        state[STATE_KEY] |= self._step_correction.state_dict()
        return state

    def shared_state(self) -> dict[str, Any]:
        return super().shared_state() | without_looks(self._step_correction.state_dict())

    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        self._cut_by_rates()  # of the wrapped optimizer's groups, which are loaded by now
        super().load_shared_state(state)
        self._step_correction.load_state_dict(state)

    def _load(self, own: Mapping[str, Any], wrapped: Mapping[str, Any]) -> None:
        self._cut_by_rates(wrapped["param_groups"])
        super()._load(own, wrapped)
        self._step_correction.load_state_dict(own)

    def _make_way(self) -> None:
        self.leave_ahead()

    def _for_step(self, closure: bool) -> AbstractContextManager[None]:
        self._refuse_mid_step("step()")
        return self.ahead() if closure else nullcontext()

    def _take_step(self) -> None:
        if self._followed is not None and self._followed.ddp is not None and not self._told_of_ddp:
            self._told_of_ddp = True
            self.tell_of_ddp(self._followed.ddp)
        self._begin_step()
        self._tell_of_beta1()
        self._refuse_sparse(range(len(self._trained)))
        self._cut_by_rates()
        where = self._lookahead.for_step(self._exchange.settings.last_density)
        self._begin_exchange()  # before anything changes, in case the schedule gives what is no density
        updates, undo = list[Tensor](), self._as_now()

        def start() -> None:
            self._exchange.clip([p.grad for p in self._trained if p.grad is not None])
            self._step_correction.look(self._trained, self._exchange.taken)
            with where():
                updates[:] = updates_of(self.optimizer, self._trained)
                self._step_correction.lengthen(dict(zip(self._trained, updates, strict=True)))
            self._means.start(dict(enumerate(updates)), range(len(self._means.buckets)), clips=False)

        means = self._means.after(start, undo, beside=[self._step_correction])
        if not self._means.stands:
            undo()
            self._exchange.skipped += 1
            return
        self._means.put(means, updates)
        with torch.no_grad():
            torch._foreach_add_(self._trained, updates)

    def _as_now(self) -> Callable[[], None]:
        """Function that takes back what a step changes before its updates are exchanged, if it may have to."""
        settings = self._exchange.settings
        if not settings.undoes(self.comm):
            return lambda: None
        undo, noise = remembered(self.optimizer), self._step_correction.state_dict()
        clips = self.comm.elastic and settings.clip_norm is not None
        clipped = [(p.grad, p.grad.clone()) for p in self._trained if clips and p.grad is not None]

        def take_back() -> None:
            undo()
            self._step_correction.load_state_dict(noise)
            for gradient, before in clipped:
                gradient.copy_(before)

        return take_back

    def _tell_of_beta1(self) -> None:
        for position, beta1 in list(self._lowered.items()):
            if (found := self.optimizer.param_groups[position]["betas"][0]) >= LEAST_CYCLED:
                warnings.warn(AGAIN.format(found=found, beta1=beta1), stacklevel=4)
                self._lowered.clear()
                return

    def _refuse_mid_step(self, what: str) -> None:
        self.leave_ahead()
        if self._lookahead.now:
            raise RuntimeError(f"{what} inside ahead(), where parameters are not those of all ranks: leave it first")

    def _cut_by_rates(self, groups: Sequence[Mapping[str, Any]] | None = None) -> None:
        """Moves residuals into new buckets between steps; the algorithm's state of old buckets is forgotten."""
        if self._rates.changed(groups):
            self._open()

    def _open(self) -> None:
        self._exchange.cut = self._rates.facts
        self._means = Means(self._exchange, self._rates.buckets())


def updates_of(optimizer: Optimizer, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Takes the optimizer's step with this rank's gradients, and undoes it: what it added to each parameter.

    The optimizer's own state has taken the step. Where a gradient is not finite it has not: updates are zeros then, and
    NaN at the elements in question, whatever the optimizer would make of them.
    """
    finite = [all_finite(p.grad) for p in parameters if p.grad is not None]
    if finite and not bool(torch.stack([flag.to(finite[0].device) for flag in finite]).all()):  # one look at a GPU
        return [_only_nonfinite(p) for p in parameters]
    with torch.no_grad():
        before = [p.detach().clone() for p in parameters]
        optimizer.step()
        updates = list(torch._foreach_sub(list(parameters), before))
        torch._foreach_copy_(list(parameters), before)
    return updates


def _only_nonfinite(p: Tensor) -> Tensor:
    update = torch.zeros_like(p, requires_grad=False)
    return update if p.grad is None else update.masked_fill_(~p.grad.isfinite(), torch.nan)


def remembered(optimizer: Optimizer) -> Callable[[], None]:
    """Function that restores, bit for bit, the optimizer's present state and its groups' settings.

    Writes into the same tensors, each time that it is called. An optimizer's own attributes are not restored. Memory: a
    copy of the state.
    """
    state = {p: _copied(kept) for p, kept in optimizer.state.items()}
    groups = [_copied({name: v for name, v in group.items() if name != "params"}) for group in optimizer.param_groups]

    def bring_back() -> None:
        optimizer.state.clear()
        optimizer.state.update({p: _restored(kept) for p, kept in state.items()})
        for group, kept in zip(optimizer.param_groups, groups, strict=True):
            group.update(_restored(kept))

    return bring_back


def _copied(kept: Any) -> dict[str, tuple[Any, Any]]:
    """Each object by name, with a copy of its content."""
    return {name: (v, v.detach().clone() if isinstance(v, Tensor) else copy.deepcopy(v)) for name, v in kept.items()}


def _restored(kept: dict[str, tuple[Any, Any]]) -> dict[str, Any]:
    return {
        name: v.copy_(before) if isinstance(v, Tensor) else copy.deepcopy(before) for name, (v, before) in kept.items()
    }
