"""`DistributedOptimizer`: any torch optimizer, fed with the mean gradient over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from communicators import Bucket, Communicator, Stats, as_communicator, buckets_of
from replicas.default_group import refuse_alone
from replicas.first_broadcast import broadcast_parameters
from replicas.inside_ddp import InsideDDP
from replicas.parameters import name_parameters, refuse_changes
from replicas.replaced import Replaced
from replicas.saved_by import KEY
from replicas.wrapped_state import refuse_torch_helpers, wrapped_part, wrapped_state
from replicas.wrapping import Wrapping
from sparse_collectives import Algorithm, Choice
from sparse_compress import Compressor
from torch import Tensor
from torch.optim import Optimizer

from data_parallel.adam_step_correction import AdamStepCorrection, ahead_by
from data_parallel.ahead import Ahead
from data_parallel.backward_order import BUCKET_BYTES, BackwardOrder, take_over
from data_parallel.clipping import check_clip_norm
from data_parallel.exchange import Exchange
from data_parallel.gradients import gradients_of, made, unscale
from data_parallel.means import Means
from data_parallel.rates import ByRates, Groups
from data_parallel.rewind import remembered
from data_parallel.schemes.choose import choose_scheme
from data_parallel.schemes.table import WholeScheme
from data_parallel.seen_optimizer import SeenOptimizer
from data_parallel.settings import (
    check_compressor,
    check_count,
    check_dense_below,
    check_momentum,
    check_optimizer,
    check_sends,
    check_settings,
    fixed,
    refuse_sharded,
    to_train,
)
from data_parallel.state_dict import (
    check_fit,
    check_groups,
    check_saved_by,
    check_sent,
    complete,
    gathered_state,
    own_state,
    saved_by,
    sending,
)
from data_parallel.steps import Schedule, Steps
from data_parallel.uneven import Shadow, group_for_join
from data_parallel.unfit import unfit
from data_parallel.updates import taken

UNDER_DDP = "; or wrap no optimizer, but ddp.register_comm_hook(SparseHookState(...), sparse_hook)"
SETTINGS = frozenset(
    {"algorithm", "bucket_bytes", "choice", "clip_norm", "comm", "compressor", "dense_below", "density", "momentum"}
    | {"nonfinite", "options", "overlap", "sends", "verify", "wire"}
)


class DistributedOptimizer(Wrapping):
    """Wraps an optimizer so that each step is taken with the mean of all ranks' gradients.

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(optimizer, model.named_parameters(), momentum=0.9)
        loss.backward()
        optimizer.step()

    At construction all ranks get rank 0's parameters (not its buffers). Then, on every rank:

        acc ← residual + gradient;  s ← compressor(acc);  residual ← acc − s                  (`ErrorFeedback`)
        total, dropped ← sparse_allreduce(s);  residual ← residual + dropped
        p.grad ← total / P;  optimizer.step()

    Args:
        optimizer: Built over the live parameters; this object shares its param_groups, state and defaults, so
            learning-rate schedulers take either.
        named_parameters: Those of the whole model. Frozen ones (requires_grad False, now) are left out of the exchange.
            Freezing, unfreezing or adding some later is an error of the next step: make a new DistributedOptimizer.
            ValueError if none is left.
        comm: See `communicators.as_communicator`; its `timeout` is how long a step waits for a late rank.
        sends: "gradients", as above. "updates": what the wrapped optimizer would do with this rank's own gradients, for
            Adam and other adaptive ones, which learn badly from the few gradients that were sent (see `updates`):

                Δ ← what optimizer.step() adds to p;  acc ← residual + Δ;  s ← compressor(acc);  …;  p ← p + total / P

            The wrapped optimizer's moments are each rank's own, and noisier than those of the mean gradient: Adam,
            AdamW, NAdam and RMSprop take longer steps to correct for that (see `AdamStepCorrection`); a warning names others that
            divide by the size of gradients. Waiting in residuals acts like momentum, and momentum prolongs the wait:
            take betas=(0.5, 0.999). The step comes before the exchange, and p.grad stays as it was: clip it as in
            training on one device, or by clip_norm; there is no `synchronize`. Groups with different rates have
            separate selections, see `rates`: rates may change from step to step, in the same way on all ranks.
            Forward and backward belong inside `with optimizer.ahead():`, see there.
        density: The fraction of elements that a rank sends, default 0.01, or a schedule: a function of the number of
            steps taken, such as `sparse_compress.WarmUp`; the same on every rank. Density 1 is a dense sum, on no wire.
        compressor: The selection, default TopK(density). "oktopk", "spardl" and "dense" accept only TopK, and take its
            k.
        algorithm: A name in `ALGORITHMS`, or an `Algorithm` of your own. "dense" sums dense gradients, without
            compressor and residuals; "powersgd", "dense-int8", or a `WholeScheme` of your own sends something of every
            element, with residuals, without compressor.
            "auto" measures the ranks now and takes the one predicted to be fastest; `choice` says which and why.
        options: The algorithm's own settings, such as {"teams": 2} for "spardl"; "auto" chooses them too.
        wire: Encoding of the values: "fp32"; for selections also fewer bytes, see `WIRES`, with rounding errors kept in
            the residual; for "dense" also "bf16" or "fp16", with rounding errors lost.
        momentum: Momentum of DGC's correction, before the selection (see `ErrorFeedback`). The wrapped optimizer's own
            comes after the exchange and learns badly at small densities: give it here and leave that at 0.
        clip_norm: Limits the norm of this rank's own gradient, over the whole model, to clip_norm · √P before the
            selection, which keeps the mean's at about clip_norm (DGC's local clipping, see `clip_limit`). With
            `overlap` each bucket is clipped by itself to √share of that limit, where share is its fraction of the
            elements. The clipped part is not kept.
        dense_below: Tensors of fewer elements, such as biases and norms, are summed dense in the same call, beside the
            selection from the others; their momentum is plain. 0: none.
        bucket_bytes: Size of the buckets for selection and exchange; default: the whole model at once (with
            sends="updates" all groups of similar rates together), with `overlap` BUCKET_BYTES.
        overlap: Each bucket's selection and exchange start during backward, as soon as its gradients are ready, those
            of the last layers first. All but the last backward of a step then belong into `no_sync()`.
        nonfinite: "raise": a NaN or inf in any rank's gradient, or update, is a CollectiveError, on every rank, that
            names rank and parameter; no parameter changes, but what residuals took in that step is lost, and with
            sends="updates" moments may have taken it. "skip": every rank skips the step, counts it in `skipped`, and
            keeps residuals and momenta as they were, bit for bit, for twice their memory; p.grad then holds the
            non-finite mean on every rank. With sends="updates" the wrapped optimizer's state is restored too, at the
            cost of a copy during step(), and p.grad stays.
        verify: Number of steps between comparisons of a hash of the parameters across ranks. A difference is a
            CollectiveError on every rank that says who and where; None: never. Unless it is 0, the ranks also compare a
            hash of the parameters in the first exchange, and the groups' settings, such as rates, in that of every
            100th step, at no extra cost: a difference is a CollectiveError on every rank.

    Settings are fixed at construction; a compressor's own density may change, in the same way on every rank, unless a
    schedule sets it.

    The module should not be in DDP: DDP would first exchange dense gradients in vain, and a warning says so. Under DDP
    use `SparseHookState`, or `ddp.no_sync()` around all backwards.

    A parameter without a gradient counts as zeros, and gets its part of the mean like the others: all ranks update
    the same parameters, even those that only some of them used.

    With torch's GradScaler take nonfinite="skip" and the usual lines; before a `synchronize()` of your own call
    `scaler.unscale_(optimizer)`. For ranks with different numbers of steps use torch's `Join([optimizer])`, see
    `join_hook`. The wrapped optimizer must need its closure only once (LBFGS needs it more often).
    """

    _step_supports_amp_scaling = True  # so that GradScaler calls step() on every rank, also where it found inf

    def __init__(
        self,
        optimizer: Optimizer,
        named_parameters: Iterable[tuple[str, Tensor]],
        *,
        comm: Any = None,
        sends: str = "gradients",
        density: float | Schedule | None = None,
        compressor: Compressor | None = None,
        algorithm: str | Algorithm | WholeScheme = "gtopk",
        options: Mapping[str, Any] | None = None,
        wire: str = "fp32",
        momentum: float = 0.0,
        clip_norm: float | None = None,
        dense_below: int = 0,
        bucket_bytes: int | None = None,
        overlap: bool = False,
        nonfinite: str = "raise",
        verify: int | None = None,
    ) -> None:
        compressor, momentum = check_compressor(compressor, density), check_momentum(momentum)
        check_settings(algorithm, options, wire, compressor, momentum, "the wrapped optimizer")
        bucket_bytes, clip_norm = check_count("bucket_bytes", bucket_bytes, "bytes"), check_clip_norm(clip_norm)
        verify = check_count("verify", verify, "steps", least=0)
        check_optimizer(optimizer, nonfinite)
        dense_below = check_dense_below(dense_below, algorithm)
        check_sends(sends, algorithm, optimizer, momentum=momentum, overlap=overlap)
        named = name_parameters(optimizer, named_parameters)
        refuse_sharded(named)
        given, comm = comm, as_communicator(comm)
        trained = to_train(named)
        scheme, self._choice = choose_scheme(
            comm,
            algorithm=algorithm,
            options=options,
            wire=wire,
            compressor=compressor,
            momentum=momentum,
            dense_below=dense_below,
            selects=sends == "updates",
            parameters=list(trained.values()),
            tentative=nonfinite == "skip",
        )
        super().__init__(optimizer)
        self._sends, self._steps = sends, Steps(compressor, density, verify)
        self._seen: SeenOptimizer | None = None
        if scheme.selects:
            known = {"momentum": momentum, "density": self._steps.last_density, "sends": sends, "ranks": comm.size}
            judge: Callable[[Optimizer], str | None] = partial(unfit, **known)
            self._seen = SeenOptimizer(self._steps, judge, owner=type(self).__name__)
            self._seen.say(judge(optimizer), stacklevel=3)
        self._group, self._by_default = given, given is None
        self._comm, self._scheme, self._nonfinite = comm, scheme, nonfinite
        self._compressor, self.skipped = compressor, 0
        if overlap:  # gradients come in about the reverse order of the parameters
            trained, bucket_bytes = dict(reversed(trained.items())), bucket_bytes or BUCKET_BYTES
        self._names, self._trained = list(trained), list(trained.values())
        self._all, self._named = named, {id(p): name for name, p in named.items()}
        self._replaced = Replaced(trained, "DistributedOptimizer")
        self._synchronized = self._accumulates = False
        self._shadow: Shadow | None = None
        self._inside_ddp = InsideDDP(self._trained, given, owner="DistributedOptimizer", instead=UNDER_DDP)
        self._exchange = Exchange(
            scheme,
            comm,
            self._names,
            owner="a DistributedOptimizer",
            nonfinite=nonfinite,
            native=not overlap,
            clip_norm=clip_norm,
            what=sends.removesuffix("s"),
        )
        share, self._step_correction = ahead_by(optimizer, comm.size), AdamStepCorrection(optimizer, comm, sends=sends)
        self._ahead = Ahead(trained, partial(self._exchange.error_state, "residuals"), share=share)
        self._rates = ByRates(optimizer, self._trained, bucket_bytes) if sends == "updates" else None
        buckets = buckets_of(self._trained, bucket_bytes) if self._rates is None else self._rates.buckets()
        self._cut(buckets)
        self._overlap = BackwardOrder(self._trained, buckets, self._start) if overlap else None
        take_over(optimizer, self._overlap)
        settings = f"{scheme.name}, wire={scheme.wire!r}, {momentum=}, {bucket_bytes=}, {overlap=}, {nonfinite=}"
        more = [] if verify is None else [f"{verify=}"]
        more += [f"{sends=}, {clip_norm=}"] if clip_norm or sends != "gradients" else []
        settings = self._settings = ", ".join([settings, *more, *scheme.settings])
        settings += self._exchange.cut
        broadcast_parameters(named, comm, what="DistributedOptimizer", settings=settings)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in SETTINGS:
            raise fixed(type(self).__name__, name)
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        """Settings, of the wrapped optimizer too."""
        ranks = f"rank {self._comm.rank} of {self._comm.size}"
        compressor = f"compressor={self._compressor}, " if self._scheme.selects else ""
        return f"{type(self).__name__}({self._settings}, {compressor}{ranks}, {self.optimizer!r})"

    @property
    def comm(self) -> Communicator:
        """The ranks."""
        ranks: Communicator = self._comm
        return ranks

    @property
    def choice(self) -> Choice | None:
        """Choice of "auto", with its reason; None if the algorithm was named."""
        return self._choice

    @property
    def selection_seconds(self) -> float:
        """Seconds spent selecting, rounding or factoring so far, by this rank's `comm.clock`."""
        return self._exchange.selection_seconds

    @property
    def compressor(self) -> Compressor:
        """Compressor that selects the entries to send."""
        return self._compressor

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Synchronizes, unless `synchronize` was called since the last step, and takes the wrapped optimizer's step.

        Args:
            closure: Computes the loss and its gradients; it is called once, before the exchange.

        Returns:
            What the closure returned.

        Raises:
            CollectiveError: As `synchronize`.
            RuntimeError: Inside `no_sync`, or a closure was given after `synchronize`.
        """
        refuse_torch_helpers("DistributedOptimizer")
        self._refuse_no_sync("step()")
        self._refuse_ahead("step()")
        loss = None
        if closure is not None:
            if self._synchronized:
                raise RuntimeError("a closure computes new gradients after synchronize(): use one or the other")
            with torch.enable_grad(), self.ahead() if self._sends == "updates" else nullcontext():
                loss = closure()
        scale: Tensor | None = getattr(self, "grad_scale", None)
        unscale(self._trained, scale, overlap=self._overlap is not None, synchronized=self._synchronized)
        if self._sends == "updates":
            self._step_by_updates()
        else:
            self._step_by_gradients()
        self._synchronized = False
        self._steps.count(self._all, self._comm)
        return loss

    def synchronize(self) -> None:
        """Puts the mean over ranks into every p.grad, so that it can be clipped before `step`; for every rank to call.

        Raises:
            CollectiveError: The same on every rank: a gradient is not finite (see `nonfinite`), or an exchange fails.
            ValueError: Before anything is exchanged: parameters were frozen, unfrozen or added since this optimizer was
                made; with `overlap` backward raises it.
            RuntimeError: Inside `no_sync`, twice for one step, or with sends="updates".
        """
        self._refuse_no_sync("synchronize()")
        if self._sends == "updates":
            raise RuntimeError(
                'sends="updates" exchanges what the optimizer does, in step(), so there is no mean gradient before it: '
                "leave synchronize() out; this rank's own gradients may be clipped, or clip_norm= does it"
            )
        if self._synchronized and self._means.stands:
            raise RuntimeError("synchronize() was called twice for one step(): the mean would be exchanged again")
        self._begin_step()
        means = self._means.after(self._start_all)
        gradients = made(self._trained)
        self._means.put(means, gradients)
        self._synchronized = True
        if self._seen is not None:
            self._seen.note(self._trained, gradients)

    def stats(self) -> Stats:
        """Costs and savings of training on this rank since the optimizer was made; needs no communication.

        Returns:
            Plain numbers for any logger; `str` shows them in a line. See `communicators.Stats`, and:

            - bytes_sent: Bytes of exchanges; only `comm.bytes_sent` counts `verify`, `AdamStepCorrection` and the first
              parameters.
            - seconds_selecting: Seconds of selecting, rounding or factoring.
            - density: The fraction of elements that a rank sends now; 1 where nothing is selected.
            - residual_norm: The 2-norm of all parameters' residuals. Takes one pass over them.
        """
        counted = {"steps": self._steps.taken, "skipped": self.skipped}
        return Stats({**counted, **self._exchange.stats(), "density": self._steps.density_of(self._scheme.entry)})

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears gradients like torch.optim.Optimizer.zero_grad, and forgets that `synchronize` was called.

        With `overlap` it also ends a partial or failed backward, if nothing has been sent yet.

        Args:
            set_to_none: Whether gradients are set to None instead of being zeroed.

        Raises:
            RuntimeError: Gradients are under way.
        """
        if self._overlap is not None:
            if self._overlap.under_way:
                raise RuntimeError(
                    "zero_grad() while gradients are under way: call step(), or, to throw their mean away, "
                    "synchronize() and then zero_grad(), on every rank; synchronize() also sends the other gradients, "
                    "as they are now, and what was not selected stays in the residuals for later steps"
                )
            self._overlap.reset()
        self._synchronized = False
        super().zero_grad(set_to_none)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients only accumulate inside: nothing is exchanged, and `step` and `synchronize` are errors."""
        outer = self._accumulates
        self._accumulate(True)
        try:
            yield
        finally:
            self._accumulate(outer)

    def ahead(self) -> AbstractContextManager[None]:
        """Context for sends="updates" in which parameters are this rank's own: the common ones + its residuals.

            with optimizer.ahead():
                loss(model(inputs)).backward()
            optimizer.step()

        Residuals are scaled by 1/P with Adam and its like, and by 1 with SGD; see `Ahead`. So gradients take into
        account the updates that wait, for about 1 / density steps. Forward and all of backward belong inside,
        evaluation does not: outside, parameters are the same on all ranks, bit for bit. `step(closure)` does this
        itself.

        Raises:
            RuntimeError: Gradients are sent, or this is inside another `ahead()`; `step` and states raise it inside
                too. At the end: a parameter was written to inside, which is undone.
        """
        if self._sends != "updates":
            raise RuntimeError('ahead() is for sends="updates": what waits of gradients is no part of parameters')
        return self._ahead.moved()

    def join_hook(self, **kwargs: Any) -> Shadow:
        """Hook of `torch.distributed.algorithms.join.Join([optimizer])`, for ranks with different numbers of steps.

        A rank that has finished takes part in the others' steps with zero gradients: see `Shadow`.
        """
        if kwargs:
            raise TypeError(f"Join was given {sorted(kwargs)}, but means are over all ranks, as ever: leave it out")
        group_for_join(self._group)
        self._shadow = Shadow(self)
        return self._shadow

    @property
    def join_device(self) -> torch.device:
        """Device that `Join` uses."""
        return self._trained[0].device

    @property
    def join_process_group(self) -> Any:
        """Process group that `Join` uses."""
        return group_for_join(self._group)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state and, as "distributed", this rank's residuals and momenta by parameter.

        Another one on every rank: each saves its own. References; loadable by torch.load(weights_only=True).

        Raises:
            RuntimeError: Between backward, or synchronize(), and step(): what is under way belongs to neither.
        """
        refuse_torch_helpers("DistributedOptimizer")
        self._refuse_mid_step("state_dict()")
        self._cut_by_rates()  # as the next step would
        kept = self._exchange.state_dict()
        own = {
            **saved_by(self._comm),
            **sending(self._sends),
            "algorithm": self._scheme.name,
            "skipped": self.skipped,
            "steps": self._steps.taken,
            **self._step_correction.state_dict(),
            **kept,
            **complete(kept, self._scheme.keeps, zip(self._names, self._trained, strict=True)),
        }
        wrapped, own["wrapped"] = wrapped_state(self.optimizer, stepped=self._steps.taken > self.skipped)
        return {**wrapped, KEY: own}

    def gathered_state_dict(self) -> dict[str, Any]:
        """The states of all ranks in one, for a checkpoint that rank 0 alone writes; for every rank to call.

        On rank 0, which holds it in the CPU's memory; {} elsewhere. Every rank loads it by `load_state_dict`, which
        takes its own part. What the wrapped optimizer keeps, the same on all ranks, is in it once (with
        sends="updates" each rank has its own). Loadable by torch.load(weights_only=True).
        Where `state_dict` raises on one rank, the others raise a CollectiveError that names it.
        """
        take = partial(DistributedOptimizer.state_dict, self)
        return gathered_state(take, self._comm, alike=self._sends == "gradients")

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on where this rank's `state_dict`, or `gathered_state_dict`, was taken, with the same bits.

        Args:
            state_dict: What `state_dict` gave on this rank, or `gathered_state_dict` on rank 0, or what
                `reshard_residuals` made of it.

        Raises:
            TypeError: It is no state, such as None or a list.
            ValueError: Before anything is changed: it is of another rank or world size (see `reshard_residuals`), or
                parameters do not fit.
            RuntimeError: Gradients are under way.
        """
        refuse_torch_helpers("DistributedOptimizer")
        self._refuse_ahead("load_state_dict()")
        if self._overlap is not None and self._overlap.under_way:
            raise RuntimeError("load_state_dict() while gradients are under way: call step() first")
        state_dict = own_state(state_dict, self._comm)
        own = check_saved_by(state_dict, self._comm.rank, self._comm.size)
        check_sent(own, self._sends)
        wrapped = wrapped_part(state_dict)
        check_groups(wrapped, self.optimizer)
        if self._scheme.keeps:
            check_fit(own, {name: p.shape for name, p in zip(self._names, self._trained, strict=True)})
        self._cut_by_rates(wrapped["param_groups"])
        self._exchange.load_state_dict(own)
        self.optimizer.load_state_dict(wrapped)
        self.skipped = own["skipped"]
        self._steps.resume(own.get("steps", 0))
        self._step_correction.load_state_dict(own)
        self._synchronized = False

    def _step_by_gradients(self) -> None:
        if not self._synchronized:
            self.synchronize()
        if self._means.stands:
            self.optimizer.step()
        else:
            self.skipped += 1

    def _step_by_updates(self) -> None:
        self._begin_step()
        self._cut_by_rates()
        where = self._ahead.as_for_gradients(self._steps.last_density)
        self._begin_exchange()  # before anything changes, in case the schedule gives what is no density
        self._exchange.clip([p.grad for p in self._trained if p.grad is not None])
        undo = remembered(self.optimizer) if self._nonfinite == "skip" else None
        noise = self._step_correction.state_dict()
        self._step_correction.look(self._trained, self._steps.taken)
        with where:
            updates = taken(self.optimizer, self._trained)
            self._step_correction.lengthen(dict(zip(self._trained, updates, strict=True)))
        means = self._means.after(partial(self._means.start, dict(enumerate(updates)), clips=False))
        if undo is not None and not self._means.stands:
            undo()
            self._step_correction.load_state_dict(noise)
            self.skipped += 1
            return
        self._means.put(means, updates)
        with torch.no_grad():
            torch._foreach_add_(self._trained, updates)

    def _cut(self, buckets: Sequence[Bucket]) -> None:
        self._exchange.cut = "" if self._rates is None else self._rates.facts
        self._means = Means(self._exchange, buckets)

    def _cut_by_rates(self, groups: Groups | None = None) -> None:
        """Moves residuals into new buckets between steps; the algorithm's state of old buckets is forgotten."""
        if self._rates is not None and self._rates.changed(groups):
            self._cut(self._rates.buckets())

    def _begin_step(self) -> None:
        if self._shadow is not None:
            self._shadow.tell()
        if self._by_default and self._comm.size == 1:
            refuse_alone("a DistributedOptimizer")
        self._inside_ddp.look()
        self._replaced.refuse()
        refuse_changes(self.optimizer, self._named, self._trained, what="DistributedOptimizer")

    def _begin_exchange(self) -> None:
        self._steps.begin()
        if self._shadow is None:  # in `Join` a rank that has no more steps does not schedule its rate either
            self._exchange.shared = self._steps.shared(self._all, self.optimizer)

    def _accumulate(self, only: bool) -> None:
        self._accumulates = only
        if self._overlap is not None:
            self._overlap.paused = only

    def _start(self, position: int) -> None:
        """Starts the exchange of one bucket during backward."""
        if position == 0:  # nothing has been sent yet
            refuse_changes(self.optimizer, self._named, self._trained, what="DistributedOptimizer")
            self._begin_exchange()
        members = self._means.members(position)
        self._means.start_one(position, gradients_of(self._trained, members, self._names))

    def _start_all(self) -> None:
        """Starts the exchange of all buckets that backward has not started."""
        if self._overlap is not None:
            self._overlap.start_rest()
            self._overlap.reset()
            return
        self._begin_exchange()
        every = range(len(self._trained))
        self._means.start(gradients_of(self._trained, every, self._names), clips=True)

    def _refuse_ahead(self, what: str) -> None:
        if self._ahead.now:
            raise RuntimeError(f"{what} inside ahead(), where parameters are not those of all ranks: leave it first")

    def _refuse_mid_step(self, what: str) -> None:
        self._refuse_ahead(what)
        if self._synchronized or (self._overlap is not None and self._overlap.under_way):
            raise RuntimeError(f"{what} while a step is under way: call it after step()")

    def _refuse_no_sync(self, what: str) -> None:
        if self._accumulates:
            raise RuntimeError(f"{what} inside no_sync(): leave it before the last backward of the step")
