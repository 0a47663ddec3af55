"""Hybrid sharding with a sparse exchange: `state = sparse_hsdp(model, mesh["between"], density=0.01)`."""

import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Unpack

import torch
from communicators import CollectiveError, Communicator, Stats
from replicas import STATE_KEY, broadcast_parameters, check_named_parameters, gathered_state, state_of_rank, wholly
from torch import Tensor, nn

from data_parallel.exchange import Exchange, Mean, wait_for_all
from data_parallel.hsdp.mesh import agreed, joined
from data_parallel.hsdp.shards import Shard, refuse_after_break, shards_of
from data_parallel.optimizer_watch import OptimizerWatch, part_of
from data_parallel.settings import ExchangeSettings, Settings, fixed, refuse_elastic
from data_parallel.state_dict import RESHARD
from data_parallel.watching import at_the_end

OWNER = "sparse_hsdp"
INSTEAD = 'sparse_hsdp exchanges gradients only: take SGD with momentum= here, or algorithm="dense"'
OTHER_NODES = "inside a node it must be the same number, because parts are of other sizes else: begin with a new state"


class HsdpState:
    """State of a sharded model's exchange between steps: residuals and momenta of this rank's part of each parameter.

    Its maker `sparse_hsdp` describes the exchange. The state checks how the optimizer uses the means, and warns as
    `SparseHookState` does.

    After an exception in backward, such as ctrl-C or a hook's, call zero_grad(), not step(): `p.grad` may hold a part
    of that backward. The next backward, or state_dict(), takes back what was under way; with nonfinite="skip" nothing
    of it stays in the residuals, with "raise" the entries selected in it are lost. FSDP itself continues only after
    `reset_iter_state()` of its root module, if torch has that: a forward without it is an error.

    Args:
        model: The sharded model: each parameter is in some `fully_shard`, on the mesh inside a node. Every rank calls.
        between: The ranks that hold the same part as this one: a `DeviceMesh` of one dimension, a process group, or
            anything else that `as_communicator` takes.
        nonfinite: "raise": a NaN or inf in any rank's gradient is a CollectiveError out of backward(), on every rank,
            that names rank and parameter. "skip": every rank then has no gradients (p.grad is None), so that
            optimizer.step() does nothing (unless a later backward of the same step brings gradients), counts it in
            `skipped`, and keeps residuals as they were before the step, at the cost of twice their memory.
        settings: Keywords of `ExchangeSettings`: density, algorithm (not "auto"), momentum, clip_norm, ….

    Raises:
        TypeError, ValueError: A setting does not fit, the model is not sharded this way or was given before, or ranks
            make no grid of nodes and places inside them; on every rank, before anything is written.
        RuntimeError: This torch lacks a feature that it takes.
    """

    def __init__(
        self, model: nn.Module, between: Any, *, nonfinite: str = "raise", **settings: Unpack[ExchangeSettings]
    ) -> None:
        refuse_elastic("sparse_hsdp", between, "FSDP cannot change its ranks: train without it, or wrap anew")
        checked = Settings.of(sparse_hsdp, settings, nonfinite=nonfinite)
        if checked.entry is None:
            raise ValueError("algorithm='auto' measures replicas of a whole model: name one, such as 'gtopk'")
        self._at_the_end = at_the_end()
        # the running backward: autograd alone holds what it points to, and drops that also where backward breaks off
        self._backward: weakref.ref[partial[None]] | None = None
        self._shards, named = shards_of(model)
        self._named = check_named_parameters(list(named.items()))
        self._comm, self._inside, ranks = joined(self._shards, between)
        self._exchange = Exchange(checked, self._comm, list(self._named), [], owner=OWNER, withholds=True)
        self._exchange.ranks = ranks
        self._pending: dict[Shard, tuple[Mean, Tensor]] = {}
        self._given: Sequence[Tensor] = []  # parameters with gradients after the last backward
        self._error: CollectiveError | None = None
        broadcast_parameters(self._parts(), self._comm, what=OWNER, settings=self._exchange.facts())
        self._watch = OptimizerWatch(OWNER, INSTEAD, checked)
        self._watch.follow()
        for shard in self._shards:
            shard.when_reduced(partial(self._reduced, shard))
        refuse_after_break(model, self._shards)

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_"):
            raise fixed(self, name)
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        """Settings, and where this rank is."""
        nodes, node = self._comm, self._inside
        place = f"node {nodes.rank} of {nodes.size}, rank {node.rank} of {node.size} in it"
        return f"HsdpState({self._exchange.said()}, {place})"

    @property
    def comm(self) -> Communicator:
        """The ranks that hold the same part."""
        return self._comm

    @property
    def skipped(self) -> int:
        """Number of steps that nonfinite="skip" left out."""
        return self._exchange.skipped

    def stats(self) -> Stats:
        """Costs and savings of training on this rank since the state was made; needs no communication.

        Returns:
            Plain numbers for any logger; `str` shows them in a line. See `communicators.Stats`, and:

            - bytes_sent: Bytes of exchanges between nodes; FSDP's traffic inside a node is not counted.
            - skipped: Steps that nonfinite="skip" left out.
            - seconds_selecting: Seconds of selecting, rounding or factoring.
            - seconds_waited: Seconds from the end of backward until the last mean has come.
            - density: The fraction of elements that a rank sends now; 1 where nothing is selected.
            - residual_norm: The 2-norm of the residuals of this rank's parts. Takes one pass over them.
            - verified_step, verified_hash: Step of the last comparison by `verify`, where there was one, and 48 bits of
                the parameters' hash then, which are the same on all ranks.
            - rank, ranks: Of all nodes, as in the whole world where a node's ranks follow one another; peers that are
                awaited are nodes.
            - part: Place of this rank inside its node, of whose part of each parameter all this is.
        """
        nodes, node = self._comm, self._inside
        place = {"rank": nodes.rank * node.size + node.rank, "ranks": nodes.size * node.size, "part": node.rank}
        return Stats({**self._exchange.stats(), **place})

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals and momenta by parameter, and the algorithm's state. Another one on every rank.

        Tensors are padded as FSDP pads its parts. Loadable by torch.load(weights_only=True).

        Raises:
            RuntimeError: It is called in backward.
        """
        self._refuse_in_backward("state_dict()")
        self._exchange.commit_or_rollback()
        padded = [(name, torch.empty(shape, device=device)) for name, (shape, device) in self._shapes().items()]
        return {STATE_KEY: {**self._exchange.state_dict(padded), "inside": [self._inside.rank, self._inside.size]}}

    def gathered_state_dict(self) -> dict[str, Any]:
        """The states of all ranks in one, for a checkpoint that one rank alone writes; for every rank to call.

        On the first rank of the first node, which holds it in the CPU's memory; {} elsewhere. Every rank loads it by
        `load_state_dict`, which takes its own part. Loadable by torch.load(weights_only=True).
        Where `state_dict` raises on one rank, the others raise a CollectiveError.

        Returns:
            By place inside a node the states of that place on all nodes.
        """
        of_place = partial(gathered_state, self.state_dict, self._comm, advice=RESHARD, alike=False)
        whole = gathered_state(of_place, self._inside, advice=OTHER_NODES, alike=False)
        return whole if self._comm.rank == 0 else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on where this rank's `state_dict`, or `gathered_state_dict`, was taken, with the same bits.

        Args:
            state_dict: What `state_dict` gave on this rank, or `gathered_state_dict` on the first, or, for another
                number of nodes, what `reshard_residuals` made of those of this place on all nodes.

        Raises:
            TypeError: It is no state, such as None or a list.
            ValueError: Before anything is changed: it is of another rank, of another number of ranks, or of other
                parameters.
            RuntimeError: It is called in backward.
        """
        self._refuse_in_backward("load_state_dict()")
        with wholly(self, "an HsdpState", state_dict):
            of_place = state_of_rank(state_dict, self._inside.rank, self._inside.size, advice=OTHER_NODES)
            _, own = self._exchange.own(of_place, {name: shape for name, (shape, _) in self._shapes().items()})
            here = [self._inside.rank, self._inside.size]
            if own.get("inside") != here:
                raise ValueError(f"the state is of (rank, ranks) {own.get('inside')} inside a node, but this is {here}")
            self._exchange.load_state_dict(own)

    def _reduced(self, shard: Shard, flat: Tensor) -> None:
        """FSDP's hook: one flat gradient, to be the mean between the nodes once backward has ended."""
        self._leave_broken()
        if self._backward is None:
            self._begin()
        bucket, waits = shard.bucket(flat), shard.may_wait(flat)
        numel = self._inside.size * sum(one.numel for one in self._shards)
        try:
            if shard in self._pending:  # used twice: FSDP adds this gradient to the first one's mean
                self._finish(shard)
            self._pending[shard] = self._exchange.start(bucket, flat, of=numel), flat
            if not waits:
                self._finish(shard)
        except CollectiveError as error:
            self._error = self._error or error

    def _begin(self) -> None:
        """Begins a backward at its first gradient; also a new step, unless all gradients of the last one stand."""
        self._error, end = None, partial(self._end)
        self._backward = weakref.ref(end)
        self._at_the_end(end)
        held = [p.grad for p in self._given if p.grad is not None]
        if len(held) == len(self._given) and any(bool(part_of(gradient).any()) for gradient in held):
            return
        try:
            self._exchange.begin_step()
            self._exchange.count_step(self._parts())
        except CollectiveError as error:
            self._error = error  # told to all ranks of the node, when they can be asked

    def _end(self) -> None:
        """Waits, after backward has ended on every rank, for exchanges under way; all ranks learn the outcome."""
        self._backward = None
        self._exchange.tally.waiting_since = self._comm.clock()
        try:
            self._finish(*self._pending)
        except CollectiveError as error:
            self._error = self._error or error
        failure, finite = agreed(self._error, self._exchange.finite(), self._inside)
        if failure is not None or not finite:
            self._take_back()
            if failure is not None:
                raise failure
            self._exchange.skipped += 1
            return
        self._given = held = [p for p in self._named.values() if p.grad is not None]
        if self._exchange.scheme.selects:
            self._watch.note(held, [part_of(p.grad) for p in held], self._exchange.taken)

    def _take_back(self) -> None:
        self._exchange.undo()
        for p in self._named.values():
            p.grad = None

    def _leave_broken(self) -> None:
        """Waits for what a backward had begun that an exception broke off, and takes that back."""
        if self._backward is None or self._backward() is not None:
            return
        self._backward = None
        with suppress(CollectiveError):  # of ranks that did not get so far: the next exchange says so again
            self._finish(*self._pending)
        self._take_back()

    def _refuse_in_backward(self, what: str) -> None:
        self._leave_broken()
        if self._backward is not None:
            raise RuntimeError(f"{what} in backward: call it after step()")

    def _finish(self, *shards: Shard) -> None:
        pending = [self._pending.pop(shard) for shard in shards]
        means = wait_for_all(mean for mean, _ in pending)
        for mean, (_, flat) in zip(means, pending, strict=True):
            if mean is not flat:
                flat.copy_(mean)

    def _parts(self) -> dict[str, Tensor]:
        """This rank's part of each parameter."""
        return {name: part_of(p) for name, p in self._named.items()}

    def _shapes(self) -> dict[str, tuple[torch.Size, torch.device]]:
        """Shapes and devices of the padded parts that learn, by name."""
        names = {id(p): name for name, p in self._named.items()}
        return {
            names[id(p.sharded_param)]: (p.padded_sharded_param_size, p.sharded_param.device)
            for shard in self._shards
            for p in shard.trained
        }


def sparse_hsdp(
    model: nn.Module, between: Any, *, nonfinite: str = "raise", **settings: Unpack[ExchangeSettings]
) -> HsdpState:
    """Exchanges the gradients of a model that FSDP2 shards inside each node between the nodes.

        mesh = init_device_mesh("cpu", (nodes, ranks), mesh_dim_names=("between", "inside"))
        for layer in model:
            fully_shard(layer, mesh=mesh["inside"])
        fully_shard(model, mesh=mesh["inside"])
        state = sparse_hsdp(model, mesh["between"], density=0.01)

    FSDP gives each rank its part of the node's mean gradient; from that it selects, with error feedback, and exchanges
    with the ranks that hold the same part on other nodes. Now all nodes get the first one's parameters.

    Args:
        model: The sharded model, see `HsdpState`. For every rank to call.
        between: The ranks that hold the same part as this one, see `HsdpState`.
        nonfinite: "raise" or "skip", see `HsdpState`.
        settings: Keywords of `ExchangeSettings`: density, algorithm (not "auto"), momentum, clip_norm, ….

    Returns:
        The state between steps: keep it for its checkpoints and `stats`.
    """
    return HsdpState(model, between, nonfinite=nonfinite, **settings)
