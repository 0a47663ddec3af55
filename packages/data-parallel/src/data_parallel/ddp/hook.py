"""A communication hook for DistributedDataParallel: sparse allreduce in two lines of a training script.

state = SparseHookState(density=0.01, algorithm="gtopk", momentum=0.9)
ddp.register_comm_hook(state, sparse_hook)
"""

# No `from __future__ import annotations`: DDP looks at the hook's annotations as objects.

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Self

import torch
from communicators import Bucket, Communicator, Stats, Work, as_communicator
from replicas.default_group import default_group, refuse_other_world
from replicas.parameters import check_pairs
from replicas.saved_by import KEY
from sparse_collectives import Algorithm, Choice
from sparse_compress import Compressor
from torch import Tensor
from torch._C._distributed_c10d import GradBucket  # torch.distributed has it, but not for type checkers

from data_parallel.clipping import check_clip_norm
from data_parallel.ddp.accumulated import Accumulated, put_back
from data_parallel.ddp.buckets import Buckets, spans_of, unused_spans
from data_parallel.ddp.copied import refuse_pickled
from data_parallel.ddp.failures import Failures
from data_parallel.ddp.registration_watch import RegistrationWatch
from data_parallel.ddp.resumed import Resumed, check_layout
from data_parallel.exchange import Exchange
from data_parallel.schemes.choose import choose_scheme
from data_parallel.schemes.table import WholeScheme
from data_parallel.seen_optimizer import SeenOptimizer
from data_parallel.settings import (
    check_compressor,
    check_count,
    check_dense_below,
    check_momentum,
    check_settings,
    fixed,
    said,
)
from data_parallel.state_dict import (
    check_fit,
    check_saved_by,
    complete,
    gathered_state,
    is_of_several,
    own_state,
    refuse_residuals,
    saved_by,
)
from data_parallel.steps import Schedule, Steps
from data_parallel.unfit import UNDER_DDP, unfit

OWNER = "a DDP hook"
NOT_BROUGHT = (
    "residuals wait for parameters that DDP does not bring: {names}. After requires_grad_(True) make a new "
    "DistributedDataParallel, and register this state with it; in a state that was loaded they are another model's, "
    "or it was saved without named_parameters: give them to the state that is saved and to the one that it is loaded "
    "into"
)


class SparseHookState:
    """State of `sparse_hook` between steps: residuals and momenta by parameter, and the algorithm's own state.

    Args:
        process_group: The DDP module's group, by default the default group. The state cannot see DDP's group: with
            another one, means are over that one's ranks. A state made before the group exists finds it at first use.
            Every rank makes the state, and first uses it, at the same point.
        density: The fraction of each bucket's elements that a rank sends, default 0.01, or a schedule: a function of
            the number of steps taken, such as `sparse_compress.WarmUp`, the same on every rank.
        compressor: Another selection, instead of density (with a schedule: beside it). "oktopk", "spardl" and "dense"
            have no use for one.
        algorithm: A name in `ALGORITHMS`, an `Algorithm` of your own, "powersgd", "dense-int8" or a `WholeScheme` (see
            `DistributedOptimizer`), or "auto": measures the ranks at first use, and takes the one predicted to be
            fastest for the module's `named_parameters`, which it needs; `choice` then says which and why.
        options: The algorithm's own settings, such as {"teams": 2} for "spardl"; "auto" chooses them too.
        wire: Encoding of the values: "fp32"; for selections also fewer bytes, see `WIRES`, with rounding errors kept in
            the residual; for "dense" also "bf16" or "fp16", with rounding errors lost.
        momentum: DGC's correction before the selection; then give the optimizer none (see the README).
        clip_norm: Limits the norm of this rank's own gradient to clip_norm · √P before the selection, which keeps the
            mean's at about clip_norm (DGC's local clipping, see `clip_limit`). Each bucket is clipped by itself to
            √share of that limit, where share is its fraction of the elements of `named_parameters`, which clipping
            needs. The clipped part is not kept. `clip_grad_norm_` after backward would clip entries that have
            accumulated over many steps: that part is lost, and the model learns badly. With `momentum`, double the
            learning rate: momentum is cleared where entries are sent, and clipped gradients do not grow to make up for
            that.
        dense_below: Tensors of fewer elements, such as biases and norms, are summed dense in the same call, beside the
            selection from the others, which alone `density` refers to; their momentum is plain. 0: none.
        grad_scaler: The GradScaler of mixed-precision training. Residuals are then kept unscaled, and a step that it
            skips leaves them as they were, bit for bit, at the cost of twice their memory; use one optimizer for all
            parameters, because the scaler skips by optimizer. Without a scaler, a non-finite gradient is an error on
            every rank that names rank and parameter: a CollectiveError out of backward(), like every failure of an
            exchange.
        named_parameters: All parameters of the module, so that errors and checkpoints name them; without this they are
            numbered in the order in which DDP first brings them, and a new state cannot be a template for
            torch.distributed.checkpoint.
        verify: Number of steps between comparisons of a hash of the parameters across ranks (those that DDP brings;
            with named_parameters all of them). A difference is an error on every rank that says who and where; None or
            0: never.

    DDP may change its buckets (it does after the first step): residuals follow their parameters, also into a new DDP
    module that this state is registered with, as after freezing or unfreezing some by requires_grad_. A parameter whose
    gradient is all zeros on this rank (unused) is left out of the selection, and its residual waits, because DDP
    discards the result if the parameter is unused on all ranks.

    Gradients may accumulate over several backwards, in `no_sync()` or not: only the new part is exchanged. With
    `no_sync()` there is one exchange a step, without it one per backward, each of which sends as many entries: with
    `no_sync()`, multiply the density by the number of backwards.

    Every gradient of a backward is sent sooner or later, even if the training loop discards it, such as the gradient of
    a GAN's generator loss in its discriminator. Freeze parameters that must not learn with requires_grad_(False).

    Settings are fixed when the state is made; a compressor's own density may change, in the same way on every rank,
    unless a schedule sets it. The state checks every seven steps how the optimizer uses the means, and warns about
    momentum in both places, Adam, and clipping after the exchange, because they were measured to learn badly.

    `copy.deepcopy`, `torch.save` and `AveragedModel` take a DDP module with this state; see `copied`.
    """

    _looks_up_at_once = True

    def __init__(
        self,
        process_group: Any = None,
        *,
        density: float | Schedule | None = None,
        algorithm: str | Algorithm | WholeScheme = "gtopk",
        options: Mapping[str, Any] | None = None,
        wire: str = "fp32",
        momentum: float = 0.0,
        clip_norm: float | None = None,
        dense_below: int = 0,
        grad_scaler: torch.amp.GradScaler | None = None,
        compressor: Compressor | None = None,
        named_parameters: Iterable[tuple[str, Tensor]] = (),
        verify: int | None = None,
    ) -> None:
        if grad_scaler is not None and not hasattr(grad_scaler, "get_scale"):
            raise TypeError(f"grad_scaler is {grad_scaler!r}, expected the GradScaler itself, or None without one")
        self._compressor = check_compressor(compressor, density)
        self._momentum, self._clip_norm = check_momentum(momentum), check_clip_norm(clip_norm)
        self._steps = Steps(self._compressor, density, check_count("verify", verify, "steps", least=0))
        named = list(named_parameters)
        check_pairs(named)
        check_settings(algorithm, options, wire, self._compressor, self._momentum, "the optimizer")
        self._dense_below = check_dense_below(dense_below, algorithm)
        if algorithm == "auto" and not any(p.numel() for _, p in named):
            raise ValueError('algorithm="auto" chooses by the size of the model: give named_parameters')
        if self._clip_norm is not None and not named:
            raise ValueError("clip_norm is shared out among buckets by the size of the model: give named_parameters")
        self._given = (algorithm, options, wire)
        self._settings = {
            "density": density if callable(density) else None,
            "compressor": self._compressor,
            "algorithm": algorithm,
            "options": options,
            "wire": wire,
            "momentum": momentum,
            "clip_norm": clip_norm,
            "dense_below": dense_below,
            "verify": verify,
        }
        self._group, self._grad_scaler, self._skipped = process_group, grad_scaler, 0
        self._parameters = dict(named)
        self._buckets = Buckets(named)
        self._accumulated = Accumulated()
        self._failures = Failures()  # of this backward
        self._cut: list[Bucket] = []  # as the last backward was exchanged, in order
        self._resumed: Resumed | None = None  # the first backwards after a checkpoint
        self._scale = 1.0  # of this step: a GPU is asked for it once
        judge = partial(unfit, momentum=self._momentum, density=self._steps.last_density, behind=UNDER_DDP)
        self._seen = SeenOptimizer(self._steps, judge, owner="SparseHookState" if grad_scaler is None else None)
        self._registration = RegistrationWatch(self._parameters.values(), state=self)
        self._found: tuple[Any, Communicator, Choice | None, Exchange] | None = None
        self._waiting: dict[str, Any] | None = None  # a copy's state, until its ranks are looked up
        if self._looks_up_at_once and (process_group is not None or default_group() is not None):
            self._world()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copies all but the process group and the GradScaler, which are shared; see `copied`."""
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        memo[id(self._grad_scaler)] = self._grad_scaler
        made._become(copy.deepcopy(self._parts(), memo), self._group)
        return made

    def __getstate__(self) -> dict[str, Any]:
        """Picklable parts of the state, also for torch.save of a DDP module; see `copied`."""
        refuse_pickled(self._group, self._grad_scaler)
        return self._parts()

    def __setstate__(self, parts: dict[str, Any]) -> None:
        self._become(parts, None)

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_"):
            raise fixed(type(self).__name__, name)
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        """Settings; measures nothing, so "auto" is shown as such until it has chosen."""
        algorithm, options, wire = self._given if self._found is None else (self.algorithm, self._given[1], self.wire)
        compressor = self._compressor if self._found is None or self._found[2].selects else None
        given: dict[str, Any] = {"algorithm": algorithm, "options": options, "compressor": compressor}
        given |= {"wire": wire, "momentum": self._momentum, "clip_norm": self._clip_norm}
        given |= {"dense_below": self._dense_below, "grad_scaler": self._grad_scaler and type(self._grad_scaler)}
        given |= {"verify": self._settings["verify"]}
        ranks = "no group yet" if self._found is None else f"rank {self.comm.rank} of {self.comm.size}"
        return said("SparseHookState", given, ranks)

    @property
    def comm(self) -> Communicator:
        """Communicator; looked up at first use, also by `algorithm`, `entry`, `wire` and `choice`."""
        return self._world()[1]

    @property
    def compressor(self) -> Compressor:
        """Compressor that selects the entries to send."""
        return self._compressor

    @property
    def algorithm(self) -> str:
        """Name of the algorithm; with "auto", of the one that was chosen."""
        return self._world()[3].scheme.name

    @property
    def entry(self) -> Algorithm | None:
        """The algorithm with its options; None for what is no sparse allreduce (a `WholeScheme`)."""
        return self._world()[3].scheme.entry

    @property
    def wire(self) -> str:
        """Encoding of the values."""
        return self._world()[3].scheme.wire

    @property
    def choice(self) -> Choice | None:
        """Choice of "auto", with its reason; None if the algorithm was named."""
        return self._world()[2]

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals and momenta by parameter, and the algorithm's state by bucket.

        Another one on every rank. Loadable by torch.load(weights_only=True).
        With `named_parameters` it has all that learn, with zeros where nothing is kept yet, so that a new state is a
        complete template for torch.distributed.checkpoint, which loads only what it finds there; without them a new
        state is empty, and nothing would be loaded. DCP merges equal keys of the ranks, so the key holds the rank:
        dcp.save({f"hook {rank}": state}), dcp.load({f"hook {rank}": state}).
        """
        _, comm, _, exchange = self._world()
        self._settle()
        kept = exchange.state_dict()
        trained = [(name, p) for name, p in self._parameters.items() if p.requires_grad]
        memories = complete(kept, exchange.keeps, trained)
        counted = {"steps": self._steps.taken} if self._steps.matter else {}
        own = {"algorithm": exchange.scheme.name, "buckets": self._layout(), **counted, **kept, **memories}
        return {KEY: {**saved_by(comm), **own}}

    def gathered_state_dict(self) -> dict[str, Any]:
        """The states of all ranks in one, for a checkpoint that rank 0 alone writes; for every rank to call.

        On rank 0, which holds it in the CPU's memory; {} elsewhere. Every rank loads it by `load_state_dict`, which
        takes its own part. Loadable by torch.load(weights_only=True).
        Where `state_dict` raises on one rank, the others raise a CollectiveError that names it.
        """
        return gathered_state(self.state_dict, self.comm, alike=False)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on where this rank's `state_dict`, or `gathered_state_dict`, was taken.

        With the same bits as a run that never stopped, where DDP had cut its buckets when it was saved: from two steps
        on, with static_graph three. The first two backwards then do not overlap (see `Resumed`).

        Args:
            state_dict: What `state_dict` gave on this rank, or `gathered_state_dict` on rank 0, or what
                `reshard_residuals` made of it.

        Raises:
            TypeError: It is no state, such as None or a list.
            RuntimeError: It is of several ranks, and there is no process group yet.
            ValueError: Before anything is changed: it is of another rank or world size (`reshard_residuals` first), has
                names where this state has none or the other way round, or residuals that the module has no parameters
                for, or that a dense sum has no use for. Where neither is known yet, without `named_parameters` and
                before the first step, residuals that are left over are an error of the first backward.
        """
        _, comm, _, exchange = self._world()
        if self._only_looked() and comm.size == 1 and is_of_several(state_dict):
            raise RuntimeError("load_state_dict() before there is a process group: call it after init_process_group()")
        own = check_saved_by(own_state(state_dict, comm), comm.rank, comm.size)
        layout = check_layout(own.get("buckets", []))
        if exchange.keeps:
            trained = {name: p.shape for name, p in self._parameters.items() if p.requires_grad}
            if shapes := trained or exchange.shapes:
                check_fit(own, shapes, frozen={n: p.shape for n, p in self._parameters.items() if not p.requires_grad})
        else:
            refuse_residuals(own["residuals"])
            own = {**own, "residuals": {}, "velocities": {}}
        exchange.load_state_dict(own)
        self._steps.taken = own.get("steps", self._steps.taken)
        self._cut, self._resumed = [], Resumed(layout) if layout else None

    def stats(self) -> Stats:
        """Costs and savings of training on this rank since the state was made; needs no communication.

        Returns:
            Plain numbers for any logger; `str` shows them in a line. See `communicators.Stats`, and:

            - skipped: Steps that the grad_scaler left out; the last one is counted when the next begins.
            - seconds_selecting: Seconds of selecting, rounding or factoring.
            - seconds_waited: Seconds from the end of backward until the last mean has come.
            - density: The fraction of elements that a rank sends now; 1 where nothing is selected.
            - residual_norm: The 2-norm of all parameters' residuals. Takes one pass over them.
        """
        counted = {"steps": self._steps.taken, "skipped": self._skipped}
        if self._found is None:  # before the first step: the ranks are not looked up for this
            return Stats(counted)
        exchange = self._found[3]
        return Stats({**counted, **exchange.stats(), "density": self._steps.density_of(exchange.scheme.entry)})

    def exchange(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Starts the exchange of one bucket; the future holds the mean, in the bucket's buffer.

        Args:
            bucket: As DDP gives it to a hook.

        Raises:
            TypeError: A gradient is sparse or complex.
            ValueError: DDP brings a parameter that is not among `named_parameters`.
            CollectiveError: What was exchanged before has failed.
        """
        exchange = self._world()[3]
        if bucket.index() == 0:
            self._begin()
        flat = bucket.buffer()
        _refuse_sparse(flat)
        parameters = bucket.parameters()
        known, spans = self._buckets.of(parameters, flat)
        self._accumulated.watch(known.members, parameters)
        held = self._accumulated.take_out(known, flat)
        if bucket.is_last():
            self._accumulated.whole()
        failures = self._failures
        later = failures.raised_at_the_end(last=bucket.is_last())
        over: torch.futures.Future[Any]
        take: Callable[[], Tensor]
        if self._resumed is None:
            self._cut.append(known)
            work = self._start(known, flat, spans)
            over, take = work.get_future(), work.wait
        else:
            over, take = self._resumed.hold(known, flat)
            if bucket.is_last():
                self._cut = self._resumed.release(self._buckets.names, self._start)
        if bucket.is_last():
            self._refuse_left_over(exchange)
            exchange.begin_waiting()

        def whole(_: torch.futures.Future[Any]) -> Tensor:
            """The mean in the bucket's own buffer, because DDP takes no tensor that begins amid its storage."""
            try:
                found = take()
            except Exception as error:
                if not later:
                    raise
                failures.add(error)
                return flat
            given = put_back(known, found if found is flat else flat.copy_(found), held)
            if exchange.scheme.selects:
                self._seen.note(parameters, known.views(given))
            return given

        return over.then(whole)

    def _start(self, bucket: Bucket, flat: Tensor, spans: Sequence[slice] | None = None) -> Work[Tensor]:
        exchange = self._world()[3]
        if self._clip_norm is not None:
            exchange.clip([flat], scale=self._scale, of=self._numel())
        unused = unused_spans(spans or spans_of(bucket), flat) if exchange.keeps else ()
        return exchange.start(bucket, flat, scale=self._scale, unused=unused)

    def _layout(self) -> list[list[str]]:
        """The names in each bucket, as the last backward was exchanged, here or before the checkpoint."""
        if self._resumed is not None and not self._cut:
            return self._resumed.layout
        return [[self._buckets.names[member] for member in bucket.members] for bucket in self._cut]

    def _parts(self) -> dict[str, Any]:
        """Parts that a copy is made of. Parameters are copied together with their module."""
        kept = self._waiting if self._found is None else self.state_dict()
        return {
            "settings": {**self._settings, "grad_scaler": self._grad_scaler},
            "named": list(self._parameters.items()),
            "known": list(self._buckets.parameters.items()),
            "kept": kept,
        }

    def _become(self, parts: dict[str, Any], group: Any) -> None:
        self._looks_up_at_once = False
        SparseHookState.__init__(self, None, **parts["settings"], named_parameters=parts["named"])
        self._group, self._waiting = group, parts["kept"]
        self._buckets.know(parts["known"])
        self._registration.end()
        self._registration = RegistrationWatch(self._buckets.parameters.values(), state=None)

    def _world(self) -> tuple[Any, Communicator, Choice | None, Exchange]:
        """The default group, the ranks, the algorithm, and the exchange among them: looked up and made once.

        Who only looks before there is a group sees one rank; the group is found when it is there.
        """
        if self._only_looked() and default_group() is not None:
            self._found = None
        if self._found is None:
            group, comm = default_group(), as_communicator(self._group)
            algorithm, options, wire = self._given
            scheme, choice = choose_scheme(
                comm,
                algorithm=algorithm,
                options=options,
                wire=wire,
                compressor=self._compressor,
                momentum=self._momentum,
                dense_below=self._dense_below,
                parameters=list(self._parameters.values()),
                tentative=self._grad_scaler is not None,
            )
            nonfinite = "raise" if self._grad_scaler is None else "skip" if scheme.keeps else "pass"
            clips = "" if self._clip_norm is None else f" with clip_norm={self._clip_norm}"
            exchange = Exchange(
                scheme,
                comm,
                self._buckets.names,
                owner=OWNER + clips,
                nonfinite=nonfinite,
                clip_norm=self._clip_norm,
            )
            self._found = group, comm, choice, exchange
            if (kept := self._waiting) is not None:
                self._waiting = None
                self.load_state_dict(kept)
        return self._found

    def _only_looked(self) -> bool:
        """Whether no group existed when the ranks were looked up, and nothing was exchanged or loaded since."""
        if self._group is not None or self._found is None or self._found[0] is not None:
            return False
        exchange = self._found[3]
        return not (exchange.shapes or exchange.left_over)

    def _begin(self) -> None:
        """Begins a backward at its first bucket."""
        self._failures = Failures()
        self._registration.end()
        group, comm, _, _ = self._world()
        if self._group is None:
            refuse_other_world(group, "a SparseHookState")
        if not self._accumulated.goes_on:  # else the step of the last backward is still under way
            self._settle()
            self._steps.begin()
            self._steps.count(self._parameters or self._buckets.parameters, comm)
        if self._resumed is not None and not self._resumed.begin():
            self._resumed = None
        if self._resumed is None:
            self._cut = []
        self._scale = 1.0 if self._grad_scaler is None else float(self._grad_scaler.get_scale())

    def _numel(self) -> int:
        return sum(p.numel() for p in self._parameters.values() if p.requires_grad)

    def _refuse_left_over(self, exchange: Exchange) -> None:
        """Raises ValueError if a backward has left residuals without a bucket, except those of frozen parameters."""
        if left := exchange.left_over:
            known = self._buckets.parameters
            if lost := [name for name in left if name not in known or known[name].requires_grad]:
                raise ValueError(NOT_BROUGHT.format(names=lost))

    def _settle(self) -> None:
        """Ends the last step: with a GradScaler it stands only if every bucket was finite, alike on every rank."""
        if not self._world()[3].commit_or_rollback():
            self._skipped += 1


def sparse_hook(state: SparseHookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The hook: `ddp.register_comm_hook(state, sparse_hook)`. Backward goes on while buckets are exchanged.

    Args:
        state: Of this module alone.
        bucket: As DDP gives it.

    Returns:
        A future of the mean over the ranks, in the bucket's buffer.

    Raises:
        TypeError: The state is another hook's, or DDP runs its "python_reducer".
    """
    if not isinstance(state, SparseHookState):
        raise TypeError(f"state is {state!r}: use ddp.register_comm_hook(SparseHookState(...), sparse_hook)")
    if isinstance(bucket, tuple):
        raise TypeError(
            "under torch._dynamo.config.optimize_ddp = 'python_reducer' DDP hands hooks a single gradient, inside the "
            "compiled graph, and takes no result: set torch._dynamo.config.optimize_ddp = True (its default)"
        )
    return state.exchange(bucket)


def _refuse_sparse(flat: Tensor) -> None:
    if flat.layout != torch.strided:
        raise TypeError(f"a gradient has layout {flat.layout}, expected a dense one: for an embedding use sparse=False")
