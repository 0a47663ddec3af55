"""A communication hook for DistributedDataParallel: sparse allreduce in two lines of a training script.

state = SparseHookState(density=0.01, algorithm="gtopk", momentum=0.9)
ddp.register_comm_hook(state, sparse_hook)
"""

# No `from __future__ import annotations`: DDP looks at the hook's annotations as objects.

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Self, Unpack

import torch
from communicators import Bucket, Communicator, Stats, as_communicator, tracing
from replicas import STATE_KEY, default_group, gathered_state, wholly
from sparse_collectives import Choice
from sparse_compress import Compressor
from torch import Tensor
from torch._C._distributed_c10d import GradBucket  # torch.distributed has it, but not for type checkers
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from data_parallel.ddp.buckets import Accumulated, Buckets, exchanged
from data_parallel.ddp.saved_layout import SavedBucketLayout
from data_parallel.exchange import Exchange, Mean
from data_parallel.optimizer_watch import EVERY, OptimizerWatch
from data_parallel.schemes.powersgd import PowerSGD
from data_parallel.settings import ExchangeSettings, Settings, fixed, refuse_elastic, scheduled
from data_parallel.state_dict import RESHARD
from data_parallel.watching import at_the_end

OWNER = "a DDP hook"
INSTEAD = (
    'A DDP hook sees gradients only: use UpdateOptimizer without DDP, or algorithm="dense-int8" or "powersgd" here, '
    "which select nothing"
)
NOT_BROUGHT = (
    "residuals wait for parameters that DDP does not bring: {names}. After requires_grad_(True) make a new "
    "DistributedDataParallel, and register this state with it. A loaded state of another model does not fit; save and "
    "load one with named_parameters"
)
MOVED = "moved_momentum"
"""Key of an SGD's defaults, which go with its copies: momentum that `for_model` has moved, for another `for_model`."""
NO_FILE = "save state.state_dict(), and load it into a new SparseHookState"


@dataclass
class _Backward:
    """A backward under way, or the last one. cut: its buckets as they were exchanged, in order.

    whole: those of the last that came to its end. saved: in the first backwards after a checkpoint. scale: of this
    step's loss; a GPU is asked for it once. numel: of all that learns, where gradients are clipped by their share of
    it. under_way: buckets whose mean has not come. waits: holds the label of the time after the last bucket until they
    have.
    """

    errors: list[Exception] = field(default_factory=list)
    cut: list[Bucket] = field(default_factory=list)
    whole: list[Bucket] = field(default_factory=list)
    saved: SavedBucketLayout | None = None
    scale: float = 1.0
    numel: int | None = None
    under_way: int = 0
    waits: ExitStack = field(default_factory=ExitStack)


class SparseHookState:
    """State of `sparse_hook` between steps: residuals and momenta by parameter, and the algorithm's own state.

    Args:
        process_group: The DDP module's group, by default the default group. The state cannot see DDP's group: with
            another one, means are over that one's ranks. A state made before the group exists finds it at first use.
            Every rank makes the state, and first uses it, at the same point.
        grad_scaler: The GradScaler of mixed-precision training. Residuals are then kept unscaled, and a step that it
            skips leaves them as they were, bit for bit, at the cost of twice their memory; use one optimizer for all
            parameters, because the scaler skips by optimizer. Without a scaler, or with one that is not enabled, a
            non-finite gradient is an error on every rank that names rank and parameter: a CollectiveError out of
            backward(), like every failure of an exchange.
        named_parameters: All parameters of the module, or the DDP module, which knows those that it ignores, so that
            errors and checkpoints name them; without this they are numbered in the order in which DDP first brings
            them, a new state cannot be a template for torch.distributed.checkpoint, and nothing is said where the hook
            is never registered. `clip_norm` and algorithm="auto" go by the size of the model, and need them.
        settings: Keywords of `ExchangeSettings`: density, algorithm, momentum, clip_norm, …. With `momentum`, give the
            optimizer none. "auto" measures the ranks at first use.

    DDP may change its buckets (it does after the first step): residuals follow their parameters, also into a new DDP
    module that this state is registered with, as after freezing or unfreezing some by requires_grad_. A parameter whose
    gradient is all zeros on this rank (unused) is left out of the selection, and its residual waits, because DDP
    discards the result if the parameter is unused on all ranks.

    Gradients may accumulate over several backwards, in `no_sync()` or not: only the new part is exchanged. With
    `no_sync()` there is one exchange a step, without it one per backward, each of which sends as many entries: with
    `no_sync()`, multiply the density by the number of backwards.

    Every gradient of a backward is sent sooner or later, even if the training loop discards it, such as the gradient of
    a GAN's generator loss in its discriminator. Freeze parameters that must not learn with requires_grad_(False): where
    an optimizer has a part of them, the others' standing gradients are taken for a step that goes on.

    The state checks every seven steps how the optimizer uses the means, and warns about momentum in both places, Adam,
    and clipping after the exchange, because they were measured to learn badly; and, with `named_parameters`, about an
    optimizer that takes steps although the hook was never registered.

    `copy.deepcopy`, `torch.save` and `AveragedModel` take a DDP module with this state. A copy has its own settings,
    residuals, momenta and algorithm state, belongs to the copied parameters (so a DDP module and its state are copied
    in one call), and looks up ranks at first use. With copy.deepcopy it shares the process group and the GradScaler,
    which cannot be copied. With pickle it belongs to the default group, as DDP does, and to this rank: another rank
    refuses it at first use. DDP copies hook and state, but does not register them with the copy's reducer: to train a
    copy, call `copy.register_comm_hook(state, sparse_hook)`; otherwise it sums dense gradients.
    """

    def __init__(
        self,
        process_group: Any = None,
        *,
        grad_scaler: torch.amp.GradScaler | None = None,
        named_parameters: DistributedDataParallel | Iterable[tuple[str, Tensor]] = (),
        **settings: Unpack[ExchangeSettings],
    ) -> None:
        if grad_scaler is not None and not hasattr(grad_scaler, "get_scale"):
            raise TypeError(f"grad_scaler is {grad_scaler!r}, expected the GradScaler itself, or None without one")
        if grad_scaler is not None and not grad_scaler.is_enabled():
            grad_scaler = None  # it skips no step
        why = "DDP cannot change its group: train without DDP, with a DistributedOptimizer, or wrap anew"
        refuse_elastic("SparseHookState", process_group, why)
        checked = Settings.of(SparseHookState, settings, nonfinite="raise" if grad_scaler is None else "skip")
        named = exchanged(named_parameters)
        if checked.entry is None and not any(p.numel() for _, p in named):
            raise ValueError('algorithm="auto" chooses by the size of the model: give named_parameters')
        if checked.clip_norm is not None and not named:
            raise ValueError("clip_norm is shared out among buckets by the size of the model: give named_parameters")
        self._set_up(process_group, settings=checked, grad_scaler=grad_scaler, named=named)
        if process_group is not None or default_group() is not None:
            self._ready()

    @classmethod
    def for_model(
        cls,
        ddp: DistributedDataParallel,
        optimizer: Optimizer,
        *,
        steps: int | None = None,
        density: float | Callable[[int], float] | None = None,
        **settings: Any,
    ) -> Self:
        """Registers the hook in the recommended settings; the training loop stays as it is.

            ddp, optimizer = DistributedDataParallel(model), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            state = SparseHookState.for_model(ddp, optimizer, steps=10_000)

        Where the algorithm selects, the momentum of the SGD moves to the state, so that it comes before the selection,
        and its weight decay, which stays, is divided by 1 − momentum: it is as strong as with momentum after it. The
        same holds for what the SGD gives to groups that are added later. Groups of which DDP exchanges nothing, such as
        experts that it is told to ignore, keep both; one that is added later has to name them.

        Args:
            ddp: Module without a hook.
            optimizer: Over its parameters. Where its groups have no momentum, as after another `for_model` or with a
                state that was saved after one, it is what the SGD was made with.
            steps: Steps of the whole training, of which the warm-up is a share: see `WarmUp.recommended`; default
                1,000, that is 100 dense steps at 1 %. With "powersgd" a tenth of them are dense.
            density: Share that is sent after the warm-up, or a schedule in place of it; default that of a `compressor`,
                or 0.01.
            **settings: Other arguments of the class.

        Returns:
            The state, to be saved in checkpoints.

        Raises:
            TypeError: The module is not in DDP.
            ValueError: The optimizer is of another model; or the algorithm selects, and the optimizer is no SGD, has
                Nesterov's momentum or dampening, groups with different momenta, or momentum in a group of which DDP
                ignores a part.
        """
        if not isinstance(ddp, DistributedDataParallel):
            raise TypeError(f"ddp is a {type(ddp).__name__}, expected a DistributedDataParallel, which has the hook")
        groups = _groups_of(optimizer, ddp)
        exchange = {name: value for name, value in settings.items() if name in ExchangeSettings.__annotations__}
        checked = Settings.of(cls, exchange)
        if checked.may_select:
            density = scheduled(density, steps, settings.get("compressor"))
            settings = {"momentum": _momentum_of(optimizer, groups, ddp), **settings}
        elif steps is not None and checked.algorithm == PowerSGD.name:
            settings["options"] = {"dense_steps": steps // 10, **(checked.options or {})}
        if density is not None:
            settings["density"] = density
        elsewhere = None if ddp.process_group is default_group() else ddp.process_group
        made = cls(**{"process_group": elsewhere, "named_parameters": ddp, **settings})
        ddp.register_comm_hook(made, sparse_hook)
        for group in [optimizer.defaults, *groups] if checked.may_select else ():  # defaults: of groups to be added
            if group["momentum"]:
                group["weight_decay"] = group["weight_decay"] / (1 - made._settings.momentum)
                optimizer.defaults[MOVED] = group["momentum"]
            group["momentum"] = 0.0
        return made

    def _set_up(
        self, group: Any, *, settings: Settings, grad_scaler: Any, named: Any, known: Any = (), kept: Any = None
    ) -> None:
        """Sets up a new state, or a copy. known: names and parameters that DDP has brought. kept: its state."""
        self._settings, self._group, self._grad_scaler = settings, group, grad_scaler
        self._parameters = dict(named)
        self._buckets, self._accumulated, self._now = Buckets(named, known), Accumulated(), _Backward()
        self._at_the_end = at_the_end()
        self._exchange: Exchange | None = None
        self._world: Any = None  # the default group when the ranks were looked up
        self._waiting: dict[str, Any] | None = kept  # until its ranks are looked up
        self._watch = OptimizerWatch("SparseHookState", INSTEAD, settings, compares=grad_scaler is None)
        self._watch.follow(awaited=self._buckets.parameters.values())

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copies all but the process group and the GradScaler, which are shared."""
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        memo[id(self._grad_scaler)] = self._grad_scaler
        made._set_up(self._group, **copy.deepcopy(self._parts(), memo))
        return made

    def __getstate__(self) -> dict[str, Any]:
        """Picklable parts of the state, also for torch.save of a DDP module; RuntimeError if it would lose some."""
        if self._group is not None and self._group is not default_group():
            raise RuntimeError(f"a SparseHookState of another process group than the default one is no file: {NO_FILE}")
        if self._grad_scaler is not None:
            # it would follow a copy of the scaler that nobody updates
            raise RuntimeError(f"a SparseHookState with a grad_scaler is no file: {NO_FILE}")
        return self._parts()

    def __setstate__(self, parts: dict[str, Any]) -> None:
        self._set_up(None, **parts)

    def _parts(self) -> dict[str, Any]:
        """Parts that a copy is made of. Parameters are copied together with their module."""
        return {
            "settings": self._settings,
            "grad_scaler": self._grad_scaler,
            "named": list(self._parameters.items()),
            "known": list(self._buckets.parameters.items()),
            "kept": self._waiting if self._exchange is None else self.state_dict(),
        }

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_"):
            raise fixed(self, name)
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        """Settings; measures nothing, so "auto" is shown as such until it has chosen."""
        exchange = self._exchange
        if exchange is None:
            return f"SparseHookState({self._settings.said(density=self._settings.density)}, no group yet)"
        return f"SparseHookState({exchange.said()}, rank {exchange.comm.rank} of {exchange.comm.size})"

    @property
    def comm(self) -> Communicator:
        """Communicator; looked up at first use, also by `algorithm` and `choice`."""
        return self._ready().comm

    @property
    def compressor(self) -> Compressor:
        """Compressor that selects the entries to send."""
        compressor: Compressor = self._settings.compressor
        return compressor

    @property
    def algorithm(self) -> str:
        """Name of the algorithm; with "auto", of the one that was chosen."""
        return self._ready().scheme.name

    @property
    def choice(self) -> Choice | None:
        """Choice of "auto", with its reason; None if the algorithm was named."""
        return self._ready().choice

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals and momenta by parameter, and the algorithm's state by bucket.

        Another one on every rank. Loadable by torch.load(weights_only=True).
        With `named_parameters` it has all that learn, with zeros where nothing is kept yet, so that a new state is a
        complete template for torch.distributed.checkpoint, which loads only what it finds there; without them a new
        state is empty, and nothing would be loaded. DCP merges equal keys of the ranks, so the key holds the rank:
        dcp.save({f"hook {rank}": state}), dcp.load({f"hook {rank}": state}).
        """
        exchange, names, now = self._ready(), self._buckets.names, self._now
        exchange.skipped += not exchange.commit_or_rollback()
        own = exchange.state_dict((name, p) for name, p in self._parameters.items() if p.requires_grad)
        layout = [[names[member] for member in bucket.members] for bucket in now.whole]
        return {STATE_KEY: {**own, "buckets": layout or (now.saved.layout if now.saved is not None else [])}}

    def gathered_state_dict(self) -> dict[str, Any]:
        """The states of all ranks in one, for a checkpoint that rank 0 alone writes; for every rank to call.

        On rank 0, which holds it in the CPU's memory; {} elsewhere. Every rank loads it by `load_state_dict`, which
        takes its own part. Loadable by torch.load(weights_only=True).
        Where `state_dict` raises on one rank, the others raise a CollectiveError that names it.
        """
        return gathered_state(self.state_dict, self.comm, advice=RESHARD, alike=False)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on where this rank's `state_dict`, or `gathered_state_dict`, was taken.

        With the same bits as a run that never stopped, where DDP had cut its buckets when it was saved: from two steps
        on, with static_graph three. The first two backwards then do not overlap (see `SavedBucketLayout`).

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
        exchange = self._ready()
        own = state_dict.get(STATE_KEY) if isinstance(state_dict, Mapping) else None
        size = own.get("world_size", 1) if isinstance(own, Mapping) else 1
        if isinstance(size, int) and size != 1 and exchange.comm.size == 1 and self._only_looked(exchange):
            raise RuntimeError("load_state_dict() before there is a process group: call it after init_process_group()")
        trained = {name: p.shape for name, p in self._parameters.items() if p.requires_grad}
        frozen = {name: p.shape for name, p in self._parameters.items() if not p.requires_grad}
        with wholly(self, "a SparseHookState", state_dict):
            _, own = exchange.own(state_dict, trained or exchange.shapes, frozen=frozen)
            saved = SavedBucketLayout(own.get("buckets", []))
            exchange.load_state_dict(own)
            self._now = _Backward(saved=saved if saved.layout else None)

    def stats(self) -> Stats:
        """Costs and savings of training on this rank since the state was made; needs no communication.

        Returns:
            Plain numbers for any logger; `str` shows them in a line. See `communicators.Stats`, and:

            - skipped: Steps that the grad_scaler left out; the last one is counted when the next begins.
            - seconds_selecting: Seconds of selecting, rounding or factoring.
            - seconds_waited: Seconds from the end of backward until the last mean has come.
            - density: The fraction of elements that a rank sends now; 1 where nothing is selected.
            - residual_norm: The 2-norm of all parameters' residuals. Takes one pass over them.
            - verified_step, verified_hash: Step of the last comparison by `verify`, where there was one, and 48 bits of
                the parameters' hash then, which are the same on all ranks.
        """
        if self._exchange is None:  # before the first step: the ranks are not looked up for this
            return Stats({"steps": 0, "skipped": 0})
        return self._exchange.stats()

    def exchange(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Starts the exchange of one bucket; the future holds the mean, in the bucket's buffer.

        An error is raised out of backward() with its type: DDP would make a RuntimeError of what a future raises, with
        the text of every callback on its way, but what autograd calls at the end of a backward keeps its type. So a
        future whose exchange failed gives the gradient, DDP ends its own part, and then the first error is raised.

        Args:
            bucket: As DDP gives it to a hook.

        Raises:
            TypeError: A gradient is sparse or complex.
            ValueError: DDP brings a parameter that is not among `named_parameters`.
            CollectiveError: What was exchanged before has failed.
        """
        exchange = self._begin() if bucket.index() == 0 else self._ready()
        now, flat, parameters, last = self._now, bucket.buffer(), bucket.parameters(), bucket.is_last()
        if flat.layout != torch.strided:
            raise TypeError(f"a gradient has layout {flat.layout}, expected a dense one: embeddings need sparse=False")
        ours = self._buckets.of(parameters, flat)
        held = self._accumulated.take_out(ours, flat, parameters, last=last)
        errors, in_backward = now.errors, torch._C._current_graph_task_id() != -1  # else it is DDP's `join()`
        now.under_way += 1
        mean = self._start(ours, flat) if now.saved is None else now.saved.hold(ours, flat)
        if last and in_backward:  # twice, because DDP queues its own end after the last bucket
            self._at_the_end(lambda: self._at_the_end(lambda: _raise_first(errors) if errors else None))
        if last:
            self._end(exchange)

        # into the bucket's own buffer, because DDP takes no tensor that begins amid its storage
        def put_mean(_: torch.futures.Future[Any]) -> Tensor:
            try:
                found = mean.wait()
            except Exception as error:
                if not in_backward:
                    raise
                errors.append(error)
                return flat
            finally:
                now.under_way -= 1
                if not now.under_way:
                    now.waits.close()
            if found is not flat:
                flat.copy_(found)
            for position, base in held:
                ours.views(flat)[position].add_(base)
            if exchange.scheme.selects and exchange.taken % EVERY == 1:
                self._watch.note(parameters, ours.views(flat), exchange.taken)
            return flat

        return mean.get_future().then(put_mean)

    def _start(self, bucket: Bucket, flat: Tensor) -> Mean:
        """Starts the mean of one bucket; the transport's own sums are for optimizers."""
        now = self._now
        now.cut.append(bucket)
        return self._ready().start(bucket, flat, scale=now.scale, of=now.numel)

    def _end(self, exchange: Exchange) -> None:
        """Ends what this rank does for a backward, at its last bucket: from now on it waits.

        Raises ValueError where residuals are left without a bucket, except those of frozen parameters.
        """
        now, known = self._now, self._buckets.parameters
        if now.saved is not None:
            now.saved.release(self._buckets.names, self._start)
        now.whole = now.cut
        left = exchange.unclaimed["residuals"]
        if lost := sorted(name for name in left if name not in known or known[name].requires_grad):
            raise ValueError(NOT_BROUGHT.format(names=lost))
        exchange.tally.waiting_since = exchange.comm.clock()
        now.waits.enter_context(tracing.spanning("wait"))

    def _begin(self) -> Exchange:
        """Begins a backward at its first bucket, and a step unless gradients accumulate."""
        now, exchange = self._now, self._ready()
        if self._group is None and (group := default_group()) is not self._world:
            before = "no process group" if self._world is None else "another process group"
            raise RuntimeError(
                f"a SparseHookState found {before} as the default, and there is one of {group.size() if group else 0} "
                "ranks now: its means would be over the wrong ranks; make it anew after init_process_group()"
            )
        now.errors, now.under_way, now.cut = [], 0, []
        self._watch.awaited.clear()
        if not (self._accumulated.bases and self._accumulated.goes_on()):
            self._watch.given.clear()
            exchange.begin_step()
            exchange.count_step(self._parameters or self._buckets.parameters)
        if now.saved is not None and not now.saved.begin():
            now.saved = None
        now.scale = 1.0 if self._grad_scaler is None else float(self._grad_scaler.get_scale())
        if self._settings.clip_norm is not None:
            now.numel = sum(p.numel() for p in self._parameters.values() if p.requires_grad)
        return exchange

    def _ready(self) -> Exchange:
        """Looks the ranks up and makes the exchange among them, once.

        Who only looks before there is a group sees one rank; the group is found when it is there.
        """
        exchange = self._exchange
        if exchange is None or (self._world is None and default_group() is not None and self._only_looked(exchange)):
            self._world, comm = default_group(), as_communicator(self._group)
            named = self._buckets.names, list(self._parameters.values())
            exchange = self._exchange = Exchange(self._settings, comm, *named, owner=OWNER, withholds=True)
            if (kept := self._waiting) is not None:
                self._waiting = None
                self.load_state_dict(kept)
        return exchange

    def _only_looked(self, exchange: Exchange) -> bool:
        """Whether no group existed when the ranks were looked up, and nothing was exchanged or loaded since."""
        found = exchange.shapes or exchange.unclaimed["residuals"]
        return self._group is None and self._world is None and not found


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


def _groups_of(optimizer: Optimizer, ddp: DistributedDataParallel) -> list[dict[str, Any]]:
    """Parameter groups without those of which DDP exchanges nothing."""
    ours = {id(p) for _, p in exchanged(ddp)}
    theirs = [set(map(id, group["params"])) for group in optimizer.param_groups]
    if ours.isdisjoint(set().union(*theirs)):
        raise ValueError(
            "none of the optimizer's parameters is the model's, of those that DDP exchanges: give the optimizer of "
            "this model"
        )
    return [group for group, ids in zip(optimizer.param_groups, theirs, strict=True) if not ids or ids & ours]


def _momentum_of(optimizer: Optimizer, groups: Sequence[dict[str, Any]], ddp: DistributedDataParallel) -> float:
    """Momentum of an SGD, for the state in its place; that of its constructor where it has been moved."""
    if type(optimizer) is not SGD:
        raise ValueError(
            f"the optimizer is {type(optimizer).__name__}, which learns badly from few gradients. {INSTEAD}"
        )
    if any(group["nesterov"] or group["dampening"] for group in groups):
        raise ValueError(
            "Nesterov's momentum and dampening have no counterpart before the selection: give the SGD neither, or use "
            "UpdateOptimizer without DDP"
        )
    momenta = {float(group["momentum"]) for group in groups}
    if len(momenta) > 1:
        raise ValueError(f"groups have the momenta {sorted(momenta)}, but the state has one: give all groups the same")
    ours, theirs = {id(p) for _, p in exchanged(ddp)}, {id(p) for group in groups for p in group["params"]}
    mixed = [name for name, p in ddp.module.named_parameters() if id(p) in theirs - ours and p.requires_grad]
    if mixed and momenta != {0.0}:
        raise ValueError(
            f"groups hold {mixed}, which DDP ignores, beside parameters that it exchanges, whose momentum moves to the "
            "state: give the ignored ones a parameter group of their own, which keeps its momentum"
        )
    return momenta.pop() or float(optimizer.defaults.get(MOVED, optimizer.defaults["momentum"]))


def _raise_first(errors: list[Exception]) -> None:
    error = errors[0]
    errors.clear()
    raise error
