"""Optimizers around an optimizer: the gradients of all ranks are exchanged before its step, or its updates after it."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from inspect import Parameter, signature
from typing import Any, Unpack

import torch
from communicators import Stats, buckets_of
from replicas import STATE_KEY, Wrapping, check_loaded, load_into
from sparse_collectives import Choice
from sparse_compress import Compressor
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from data_parallel.backward_order import BUCKET_BYTES, BackwardOrder
from data_parallel.exchange import Exchange
from data_parallel.means import Means
from data_parallel.optimizer_watch import OptimizerWatch
from data_parallel.settings import ExchangeSettings, Settings, check_count, fixed
from data_parallel.state_dict import RESHARD
from data_parallel.uneven import Shadow, group_for_join
from data_parallel.watching import watch

INSTEAD = "Wrap it in an UpdateOptimizer, by UpdateOptimizer.for_model(optimizer, model)"
CHANGED = (
    "the gradient of {name!r} was changed after backward had sent it (overlap=True), which the mean does not know of: "
    "change p.grad only after synchronize(), or clip by clip_norm="
)
SCALED = (
    "overlap=True sends gradients before a GradScaler's {what}: use overlap=False, or DistributedDataParallel with "
    'sparse_hook and its grad_scaler; where all is sent, as by "dense", call synchronize() before unscale_()'
)
NO_STEP = (
    "backward() after synchronize() and before step(): it adds this rank's own gradient to the mean, which the others "
    "do not have. Call step() first, or throw the mean away by optimizer.zero_grad() (the model's is not enough), on "
    "every rank; accumulate before synchronize()"
)
FIXED = {*ExchangeSettings.__annotations__, "bucket_bytes", "choice", "comm", "nonfinite", "overlap"}


Named = Iterable[tuple[str, Tensor]]


class ExchangingOptimizer(Wrapping):
    """Base of the two optimizers: what they take, a step's beginning and end, and checkpoints.

    Args:
        optimizer: Built over the live parameters.
        named: Parameters of the whole model, by name.
        comm: The ranks.
        settings: Checked ones.
        sends: "gradients" or "updates".
        overlap: Exchanges start during backward: parameters are taken in about the order of their gradients.
    """

    advice = RESHARD
    instead_of_ddp = (
        "; or wrap no optimizer, but ddp.register_comm_hook(SparseHookState(...), sparse_hook); in a training "
        "framework take its adapter of data_parallel.integrations"
    )
    instead_of_shards = "exchange between nodes by sparse_hsdp(model, mesh['between']), and step a plain optimizer"
    _step_supports_amp_scaling = True  # so that GradScaler calls step() on every rank, also where it found inf

    def __init__(
        self, optimizer: Optimizer, named: Named, comm: Any, settings: Settings, *, sends: str, overlap: bool = False
    ) -> None:
        owner = type(self).__name__
        if isinstance(optimizer, LBFGS):
            raise TypeError(f"LBFGS asks for gradients several times in a step, for which {owner} takes one")
        super().__init__(optimizer, named, comm)
        _refuse_closure(optimizer, owner)
        self._sent = dict(reversed(self.trained.items()) if overlap else self.trained.items())
        self._trained = list(self._sent.values())
        sent = list(self._sent), list(self.trained.values())
        self._exchange = Exchange(settings, self.comm, *sent, owner=owner, sends=sends, native=not overlap)
        self._accumulates = False
        self.shadow: Shadow | None = None  # until `Join` ends

    def __setattr__(self, name: str, value: Any) -> None:
        if name in FIXED:
            raise fixed(self, name)
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        """Settings, of the wrapped optimizer too."""
        ranks = f"rank {self.comm.rank} of {self.comm.size}"
        return f"{type(self).__name__}({self._exchange.said()}, {ranks}, {self.optimizer!r})"

    @property
    def choice(self) -> Choice | None:
        """Choice of "auto", with its reason; None if the algorithm was named."""
        return self._exchange.choice

    @property
    def compressor(self) -> Compressor:
        """Compressor that selects the entries to send."""
        compressor: Compressor = self._exchange.settings.compressor
        return compressor

    @property
    def selection_seconds(self) -> float:
        """Seconds spent selecting, rounding or factoring so far, by this rank's `comm.clock`."""
        return self._exchange.selection_seconds

    @property
    def skipped(self) -> int:
        """Number of steps that nonfinite="skip" left out, the same on all ranks, as no GradScaler's scale is."""
        return self._exchange.skipped

    def stats(self) -> Stats:
        """Costs and savings of training on this rank since the optimizer was made; needs no communication.

        Returns:
            Plain numbers for any logger; `str` shows them in a line. See `communicators.Stats`, and:

            - bytes_sent: Bytes of exchanges; only `comm.bytes_sent` counts `verify`, the correction of Adam's steps
              and the first parameters.
            - seconds_selecting: Seconds of selecting, rounding or factoring.
            - density: The fraction of elements that a rank sends now; 1 where nothing is selected.
            - residual_norm: The 2-norm of all parameters' residuals. Takes one pass over them.
            - verified_step, verified_hash: Step of the last comparison by `verify`, where there was one, and 48 bits of
              the parameters' hash then, which are the same on all ranks.
        """
        return self._exchange.stats()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Takes the step of all ranks: exchanges, unless that is done, and moves the parameters.

        Args:
            closure: Computes the loss and its gradients; it is called once, before the exchange.

        Returns:
            What the closure returned.

        Raises:
            CollectiveError: The same on every rank: something is not finite (see `nonfinite`), or an exchange fails.
            ValueError: Before anything is exchanged: parameters were frozen, unfrozen or added since this optimizer was
                made; with `overlap` backward raises it.
            RuntimeError: Inside `no_sync` or `ahead`, a closure was given after `synchronize`, or, with `overlap`,
                p.grad was changed after backward had sent it.
        """
        if torch.compiler.is_compiling():
            return torch.compiler.disable(self.step)(closure)  # type: ignore[no-untyped-call,no-any-return]
        self.check_step()
        self._refuse_no_sync("step()")
        loss = None
        with self._for_step(closure is not None):
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
        self._unscale(getattr(self, "grad_scale", None))
        self._take_step()
        self._exchange.count_step(self.named, when="after")
        self.let_in()
        return loss

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients only accumulate inside: nothing is exchanged, and `step` is an error."""
        outer, self._accumulates = self._accumulates, True
        try:
            yield
        finally:
            self._accumulates = outer

    def join_hook(self, **kwargs: Any) -> Shadow:
        """Hook of `torch.distributed.algorithms.join.Join([optimizer])`, for ranks with different numbers of steps.

        A rank that has finished takes part in the others' steps with zero gradients, and then has the last one's model,
        state and learning rate: see `Shadow`. Step schedulers per epoch, after `Join`, or equally often on all ranks.
        """
        if kwargs:
            raise TypeError(f"Join was given {sorted(kwargs)}, but means are over all ranks, as ever: leave it out")
        group_for_join(self._given)
        self.shadow = Shadow(self)
        return self.shadow

    @property
    def join_device(self) -> torch.device:
        """Device that `Join` uses."""
        return self._trained[0].device

    @property
    def join_process_group(self) -> Any:
        """Process group that `Join` uses."""
        return group_for_join(self._given)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state and, as "distributed", this rank's residuals and momenta by parameter.

        Another one on every rank: each saves its own. References; loadable by torch.load(weights_only=True).

        Raises:
            RuntimeError: Amid a step, of which what is under way belongs to neither side.
        """
        self._refuse_mid_step("state_dict()")
        exchange = self._exchange
        return self.state_with(exchange.state_dict(self._sent.items()), stepped=exchange.taken > exchange.skipped)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on where this rank's `state_dict`, or `gathered_state_dict`, was taken, with the same bits.

        Args:
            state_dict: What `state_dict` gave on this rank, or `gathered_state_dict` on rank 0, or what
                `reshard_residuals` made of it.

        Raises:
            TypeError: It is no state, such as None or a list.
            ValueError: Before anything is changed: it is of another rank or world size (see `reshard_residuals`), of
                the other kind of optimizer, or parameters do not fit.
            RuntimeError: Gradients are under way.
        """
        self._refuse_load()
        with self.loading(state_dict):
            state, own = self._exchange.own(state_dict, {name: p.shape for name, p in self._sent.items()})
            wrapped = check_loaded({key: held for key, held in state.items() if key != STATE_KEY}, own.get("wrapped"))
            self._load(own, wrapped)
            load_into(self.optimizer, wrapped)

    def shared_state(self) -> dict[str, Any]:
        return self._exchange.shared_state()

    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        self._exchange.load_shared(state)

    def _refuse_load(self) -> None:
        """Raises RuntimeError while a step is under way."""
        self._refuse_mid_step("load_state_dict()")

    def _load(self, own: Mapping[str, Any], wrapped: Mapping[str, Any]) -> None:
        """Loads the exchange's part. wrapped: the optimizer's, which is loaded next."""
        self._exchange.load_state_dict(own)

    def _for_step(self, closure: bool) -> AbstractContextManager[None]:
        """Context of a step's closure, if it has one; refuses a step that cannot be taken."""
        raise NotImplementedError

    def _take_step(self) -> None:
        raise NotImplementedError

    def _refuse_mid_step(self, what: str) -> None:
        raise NotImplementedError

    def _unscale(self, scale: Tensor | None) -> None:
        """Divides by a GradScaler's scale; None: the user had it unscale the gradients already."""
        if scale is not None:
            for p in self._trained:
                if p.grad is not None:
                    p.grad.div_(scale.to(p.grad.device))

    def _begin_step(self) -> None:
        if self.shadow is not None:
            self.shadow.tell()
        self.admit()
        self.check_exchange()

    def _begin_exchange(self) -> None:
        self._exchange.begin_step()
        # in `Join` a rank that has no more steps does not schedule its rate either
        if self.shadow is None or not self.shadow.uneven:
            self._exchange.share(self.named, self.optimizer)

    def _refuse_sparse(self, members: Iterable[int]) -> None:
        for member in members:
            gradient = self._trained[member].grad
            if gradient is not None and gradient.layout != torch.strided:
                name = list(self._sent)[member]
                raise TypeError(f"the gradient of {name!r} has layout {gradient.layout}: embeddings need sparse=False")

    def _refuse_no_sync(self, what: str) -> None:
        if self._accumulates:
            raise RuntimeError(f"{what} inside no_sync(): leave it before the last backward of the step")


class DistributedOptimizer(ExchangingOptimizer):
    """Wraps an optimizer so that each step is taken with the mean of all ranks' gradients.

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(optimizer, model.named_parameters(), momentum=0.9)
        loss.backward()
        optimizer.step()

    At construction all ranks get rank 0's parameters (not its buffers). Then, on every rank:

        acc ← residual + gradient;  s ← compressor(acc);  residual ← acc − s                  (`ErrorFeedback`)
        total, dropped ← sparse_allreduce(s);  residual ← residual + dropped
        p.grad ← total / P;  optimizer.step()

    Adam and other adaptive optimizers learn badly from the few gradients that were sent: `UpdateOptimizer` is for them.

    Args:
        optimizer: Built over the live parameters; this object shares its param_groups, state and defaults, so
            learning-rate schedulers take either.
        named_parameters: Those of the whole model. Frozen ones (requires_grad False, now) are left out of the exchange.
            Freezing, unfreezing or adding some later is an error of the next step: make a new DistributedOptimizer.
            ValueError if none is left.
        comm: See `communicators.as_communicator`; its `timeout` is how long a step waits for a late rank. With an
            `Elastic`, a step that a death breaks is done again with the same gradients among those left, and newcomers
            come at its end, with an empty residual; it doubles the residuals' memory, as nonfinite="skip" does, and a
            step that raises leaves them as they were.
        bucket_bytes: Size of the buckets for selection and exchange; default: the whole model at once, with `overlap`
            BUCKET_BYTES.
        overlap: Each bucket's selection and exchange start during backward, as soon as its gradients are ready, those
            of the last layers first. All but the last backward of a step then belong into `no_sync()`; p.grad may be
            changed only after `synchronize()`.
        nonfinite: "raise": a NaN or inf in any rank's gradient is a CollectiveError, on every rank, that names rank and
            parameter; no parameter changes, but what residuals took in that step is lost. "skip": every rank skips the
            step, counts it in `skipped`, and keeps residuals and momenta as they were, bit for bit, for twice their
            memory; p.grad then holds the non-finite mean on every rank.
        settings: Keywords of `ExchangeSettings`: density, algorithm, momentum, clip_norm, ….

    The module should not be in DDP: DDP would first exchange dense gradients in vain, and a warning says so. Under DDP
    use `SparseHookState`, or `ddp.no_sync()` around all backwards.

    A parameter without a gradient counts as zeros, and gets its part of the mean like the others: all ranks update
    the same parameters, even those that only some of them used.

    With torch's GradScaler take nonfinite="skip" and the usual lines; before a `synchronize()` of your own call
    `scaler.unscale_(optimizer)`. For ranks with different numbers of steps use torch's `Join([optimizer])`, see
    `join_hook`. The wrapped optimizer must need its closure only once (LBFGS needs it more often).
    """

    alike = True

    def __init__(
        self,
        optimizer: Optimizer,
        named_parameters: Named,
        *,
        comm: Any = None,
        bucket_bytes: int | None = None,
        overlap: bool = False,
        nonfinite: str = "raise",
        **settings: Unpack[ExchangeSettings],
    ) -> None:
        checked = Settings.of(DistributedOptimizer, settings, nonfinite=nonfinite)
        nbytes = check_count("bucket_bytes", bucket_bytes, "bytes")
        if not isinstance(overlap, bool):
            raise TypeError(f"overlap is {overlap!r}, expected True or False")
        super().__init__(optimizer, named_parameters, comm, checked, sends="gradients", overlap=overlap)
        self._synchronized, self._overlaps = False, overlap
        self._unwatch: Callable[[], object] = lambda: None
        self._watch = OptimizerWatch("DistributedOptimizer", INSTEAD, checked)
        if self._exchange.scheme.selects:
            self._watch.say(self._watch.judgement(optimizer, optimizer.param_groups), stacklevel=3)
        buckets = buckets_of(self._trained, nbytes or (BUCKET_BYTES if overlap else None))
        watched = (self._trained, buckets) if overlap else ([], [])
        own = weakref.proxy(self)  # its hooks end with the last reference to this, not with a collection of cycles
        self._order = BackwardOrder(*watched, lambda position: own._start(position), lambda: own._pauses())
        self._means = Means(self._exchange, buckets)
        self.start_alike(f"{self._exchange.facts()}, {bucket_bytes=}, {overlap=}")
        self.enter()

    @property
    def overlap(self) -> bool:
        """Whether exchanges start during backward."""
        return self._overlaps

    def synchronize(self) -> None:
        """Puts the mean over ranks into every p.grad, so that it can be clipped before `step`; for every rank to call.

        Until `step` or `zero_grad` of this optimizer a backward is a RuntimeError: it would add to the mean what the
        other ranks do not have. Where nonfinite="skip" leaves the step out, no mean stands, and `step` may be left out.

        Raises:
            CollectiveError: The same on every rank: a gradient is not finite (see `nonfinite`), or an exchange fails.
            ValueError: Before anything is exchanged: parameters were frozen, unfrozen or added since this optimizer was
                made; with `overlap` backward raises it.
            RuntimeError: Inside `no_sync`, or twice for one step; once all means have come, and are thrown away: with
                `overlap` a p.grad was changed after backward had sent it.
        """
        self._put_means()
        self._unwatch()
        if not self._overlaps:  # else backward is watched anyway
            self._unwatch = watch(self, dict(enumerate(self._trained)), DistributedOptimizer._refuse_backward)

    def _put_means(self) -> None:
        self._refuse_no_sync("synchronize()")
        if self._synchronized and self._means.stands:
            raise RuntimeError("synchronize() was called twice for one step(): the mean would be exchanged again")
        self._begin_step()
        changed = self._order.changed()
        means = self._means.after(self._start_all)
        if changed:
            raise RuntimeError(CHANGED.format(name=list(self._sent)[changed[0]]))
        for p in self._trained:
            if p.grad is None:
                p.grad = torch.empty_like(p)
        gradients = [p.grad for p in self._trained if p.grad is not None]
        self._means.put(means, gradients)
        self._synchronized = True
        if self._exchange.scheme.selects:
            self._watch.note(self._trained, gradients, self._exchange.taken)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears gradients like torch.optim.Optimizer.zero_grad, and forgets that `synchronize` was called.

        With `overlap` it also ends a partial or failed backward, if nothing has been sent yet.

        Args:
            set_to_none: Whether gradients are set to None instead of being zeroed.

        Raises:
            RuntimeError: Gradients are under way.
        """
        if self._order.under_way:
            raise RuntimeError(
                "zero_grad() while gradients are under way: call step(), or, to throw their mean away, synchronize() "
                "and then zero_grad(), on every rank; what was not selected stays in the residuals for later steps"
            )
        self._order.reset()
        self._forget_means()
        super().zero_grad(set_to_none)

    def _for_step(self, closure: bool) -> AbstractContextManager[None]:
        if closure and self._synchronized:
            raise RuntimeError("a closure computes new gradients after synchronize(): use one or the other")
        return nullcontext()

    def _unscale(self, scale: Tensor | None) -> None:
        if self._overlaps and scale is not None:
            raise RuntimeError(SCALED.format(what="step() hands over its scale"))
        if self._overlaps and hasattr(self, "found_inf") and not self._synchronized:  # unscaled in vain
            raise RuntimeError(SCALED.format(what="unscale_()"))
        if scale is not None and self._synchronized:
            raise RuntimeError("synchronize() met scaled gradients: call scaler.unscale_(optimizer) before it")
        super()._unscale(scale)

    def _take_step(self) -> None:
        if not self._synchronized:
            self._put_means()
        if self._means.stands:
            self.optimizer.step()
            self._watch.look(self.optimizer)
        else:
            self._exchange.skipped += 1
        self._forget_means()

    def _forget_means(self) -> None:
        self._synchronized = False
        self._unwatch()

    def _refuse_backward(self, _: int = 0) -> None:
        if self._synchronized and self._means.stands and not self.superseded:
            raise RuntimeError(NO_STEP)

    def _pauses(self) -> bool:
        self._refuse_backward()
        return self._accumulates or self.superseded

    def _start(self, position: int) -> None:
        """Starts the exchange of one bucket during backward."""
        if position == 0:  # nothing has been sent yet
            self.admit()
            self.check_exchange()
            self._begin_exchange()
        self._start_buckets([position])

    def _start_all(self) -> None:
        """Starts the exchange of all buckets that backward has not started."""
        if self._overlaps:
            self._order.start_rest()
            self._order.reset()
            return
        self._begin_exchange()
        self._start_buckets(range(len(self._means.buckets)))

    def _start_buckets(self, positions: Sequence[int]) -> None:
        """Starts buckets of gradients, zeros where backward has not reached."""
        members = [member for position in positions for member in self._means.buckets[position].members]
        self._refuse_sparse(members)
        self._means.start({member: self._trained[member].grad for member in members}, positions, clips=True)

    def _refuse_mid_step(self, what: str) -> None:
        if self._synchronized or self._order.under_way:
            raise RuntimeError(f"{what} while a step is under way: call it after step()")

    def _refuse_load(self) -> None:
        if self._order.under_way:
            raise RuntimeError("load_state_dict() while gradients are under way: call step() first")

    def _load(self, own: Mapping[str, Any], wrapped: Mapping[str, Any]) -> None:
        super()._load(own, wrapped)
        self._forget_means()


def _refuse_closure(optimizer: Optimizer, owner: str) -> None:
    """Raises TypeError where step() needs arguments: it is called without any, on gradients that are there."""
    named = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    _, *given = signature(type(optimizer).step).parameters.values()  # but self
    if needed := [one.name for one in given if one.default is Parameter.empty and one.kind in named]:
        kind = type(optimizer).__name__
        raise TypeError(
            f"{kind}.step() needs {', '.join(needed)}, and {owner} calls it without arguments, after it has called the "
            f"closure itself: give {kind} a step(closure=None) that takes the gradients as they are"
        )
