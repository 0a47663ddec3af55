"""Hybrid sharding with a sparse exchange: `state = sparse_hsdp(model, mesh["between"], density=0.01)`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from communicators import CollectiveError, Communicator, Stats, Work
from replicas.first_broadcast import broadcast_parameters
from replicas.gathered import of_rank
from replicas.parameters import check_pairs
from replicas.saved_by import KEY
from sparse_collectives import Algorithm
from sparse_compress import Compressor
from torch import Tensor, nn

from data_parallel.clipping import check_clip_norm
from data_parallel.ddp.buckets import spans_of, unused_spans
from data_parallel.exchange import Exchange
from data_parallel.gradients import part_of
from data_parallel.hsdp.backward import Backward, refuse_after_break
from data_parallel.hsdp.mesh import joined
from data_parallel.hsdp.outcome import Outcome, agreed
from data_parallel.hsdp.shards import Shard, shards_of
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
    own_state,
    saved_by,
)
from data_parallel.steps import Schedule, Steps
from data_parallel.unfit import UNDER_FSDP, unfit

OWNER = "sparse_hsdp"
OTHER_NODES = "inside a node it must be the same number, because parts are of other sizes else: begin with a new state"


def sparse_hsdp(
    model: nn.Module,
    between: Any,
    *,
    density: float | Schedule | None = None,
    compressor: Compressor | None = None,
    algorithm: str | Algorithm | WholeScheme = "gtopk",
    options: Mapping[str, Any] | None = None,
    wire: str = "fp32",
    momentum: float = 0.0,
    clip_norm: float | None = None,
    dense_below: int = 0,
    nonfinite: str = "raise",
    verify: int | None = None,
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
        model: All of whose parameters are in some `fully_shard`, on the mesh inside a node. For every rank to call.
        between: The ranks that hold the same part as this one: a `DeviceMesh` of one dimension, a process group, or
            what else `as_communicator` takes.
        density: The share of each part's elements that a rank sends, or by step; see `SparseHookState`.
        compressor: In density's place for another selection.
        algorithm: A name in `ALGORITHMS`, an `Algorithm` or a `WholeScheme`; not "auto".
        options: The algorithm's own settings.
        wire: How values travel; see `WIRES`.
        momentum: DGC's correction before the selection; then give the optimizer none.
        clip_norm: Holds the norm of a node's own gradient to clip_norm · √nodes before the selection, so that of the
            mean to about clip_norm (DGC's local clipping, see `clip_limit`): each rank's part of each `fully_shard`
            by itself to √share of that, where it has so large a share of the elements. What it takes away is not kept.
            `clip_grad_norm_` after backward loses what few entries have saved up.
        dense_below: Tensors whose parts have fewer elements are summed whole. 0: none.
        nonfinite: "raise": a NaN or inf in any rank's gradient is a CollectiveError out of backward(), on every rank,
            that names rank and parameter. "skip": every rank then has no gradients (p.grad is None), so that
            optimizer.step() does nothing (unless a later backward of the same step brings gradients), counts it in
            `skipped`, and keeps residuals as they were before the step, for twice their memory.
        verify: Every so many steps the nodes compare a hash of the parameters, and where they differ it is a
            CollectiveError out of backward(), on every rank, that says who and where; None or 0: never.

    Returns:
        What is kept between steps: keep it for its checkpoints and `stats`.

    Raises:
        TypeError, ValueError: A setting, a model that is not sharded so or was given before, or ranks that make no grid
            of nodes and places inside them; on every rank, before anything is written.
        RuntimeError: This torch lacks what it takes.
    """
    return HsdpState(
        model,
        between,
        density=density,
        compressor=compressor,
        algorithm=algorithm,
        options=options,
        wire=wire,
        momentum=momentum,
        clip_norm=clip_norm,
        dense_below=dense_below,
        nonfinite=nonfinite,
        verify=verify,
    )


class HsdpState:
    """State of a sharded model's exchange between steps: residuals and momenta of this rank's part of each parameter.

    Made by `sparse_hsdp`, which describes the exchange. Settings are fixed then; a compressor's own density may change,
    in the same way on every rank, unless a schedule sets it. The state checks how the optimizer uses the means, and
    warns as `SparseHookState` does.

    After an exception in backward, such as ctrl-C or a hook's, call zero_grad(), not step(): `p.grad` may hold a part
    of that backward. The next backward, or state_dict(), takes back what was under way; with nonfinite="skip" nothing
    of it stays in the residuals, with "raise" the entries selected in it are lost. FSDP itself continues only after
    `reset_iter_state()` of its root module, if torch has that: a forward without it is an error.

    Args:
        model: The sharded model: each parameter is in some `fully_shard`, on the mesh inside a node. Every rank calls.
        between: The ranks that hold the same part as this one: a `DeviceMesh` of one dimension, a process group, or
            anything else that `as_communicator` takes.
        density: The fraction of each part's elements that a rank sends, or a schedule; see `SparseHookState`.
        compressor: Another selection, instead of density.
        algorithm: A name in `ALGORITHMS`, an `Algorithm` or a `WholeScheme`; not "auto".
        options: The algorithm's own settings.
        wire: How values travel; see `WIRES`.
        momentum: DGC's correction before the selection; then give the optimizer none.
        clip_norm: Limits the norm of a node's own gradient to clip_norm · √nodes before the selection, which keeps the
            mean's at about clip_norm (DGC's local clipping, see `clip_limit`). Each rank's part of each `fully_shard`
            is clipped by itself to √share of that limit, where share is its fraction of the elements. The clipped part
            is not kept. `clip_grad_norm_` after backward clips entries that have accumulated over many steps, and
            loses that part.
        dense_below: Tensors whose parts have fewer elements are summed dense. 0: none.
        nonfinite: "raise": a NaN or inf in any rank's gradient is a CollectiveError out of backward(), on every rank,
            that names rank and parameter. "skip": every rank then has no gradients (p.grad is None), so that
            optimizer.step() does nothing (unless a later backward of the same step brings gradients), counts it in
            `skipped`, and keeps residuals as they were before the step, at the cost of twice their memory.
        verify: Number of steps between comparisons of a hash of the parameters across nodes. A difference is a
            CollectiveError out of backward(), on every rank, that says who and where; None or 0: never.

    Raises:
        TypeError, ValueError: As `sparse_hsdp`.
        RuntimeError: Likewise.
    """

    def __init__(
        self,
        model: nn.Module,
        between: Any,
        *,
        density: float | Schedule | None = None,
        compressor: Compressor | None = None,
        algorithm: str | Algorithm | WholeScheme = "gtopk",
        options: Mapping[str, Any] | None = None,
        wire: str = "fp32",
        momentum: float = 0.0,
        clip_norm: float | None = None,
        dense_below: int = 0,
        nonfinite: str = "raise",
        verify: int | None = None,
    ) -> None:
        if nonfinite not in ("raise", "skip"):
            raise ValueError(f"nonfinite is {nonfinite!r}, expected 'raise' or 'skip'")
        if algorithm == "auto":
            raise ValueError("algorithm='auto' measures replicas of a whole model: name one, such as 'gtopk'")
        compressor, momentum = check_compressor(compressor, density), check_momentum(momentum)
        clip_norm, verify = check_clip_norm(clip_norm), check_count("verify", verify, "steps", least=0)
        check_settings(algorithm, options, wire, compressor, momentum, "the optimizer")
        dense_below = check_dense_below(dense_below, algorithm)
        self._backward = Backward(self._end)
        self._shards, self._named = shards_of(model)
        check_pairs(list(self._named.items()))
        self._comm, self._inside = joined(self._shards, between)
        self._steps, self._clip_norm, self._skipped = Steps(compressor, density, verify), clip_norm, 0
        self._scheme, _ = choose_scheme(
            self._comm,
            algorithm=algorithm,
            options=options,
            wire=wire,
            compressor=compressor,
            momentum=momentum,
            dense_below=dense_below,
            parameters=[],
            tentative=nonfinite == "skip",
        )
        scheme = self._scheme
        self._given: dict[str, Any] = {"algorithm": scheme.name, "options": options}
        self._given |= {"compressor": compressor if scheme.selects else None}
        self._given |= {"wire": wire, "momentum": momentum, "clip_norm": clip_norm, "dense_below": dense_below}
        self._given |= {"nonfinite": nonfinite, "verify": verify}
        clips = "" if clip_norm is None else f" with {clip_norm=}"
        self._exchange = Exchange(
            scheme, self._comm, list(self._named), owner=OWNER + clips, nonfinite=nonfinite, clip_norm=clip_norm
        )
        self._pending: list[tuple[Work[Tensor], Tensor]] = []
        self._error: CollectiveError | None = None
        settings = f"{scheme.name}, {wire=}, {momentum=}, {nonfinite=}, {verify=}, {', '.join(scheme.settings)}"
        broadcast_parameters(self._parts(), self._comm, what=OWNER, settings=settings)
        self._seen: SeenOptimizer | None = None  # kept here, because nobody else does
        if scheme.selects:
            judge = partial(unfit, momentum=momentum, density=self._steps.last_density, behind=UNDER_FSDP)
            self._seen = SeenOptimizer(self._steps, judge, owner=OWNER)
        for shard in self._shards:
            shard.when_reduced(partial(self._reduced, shard))
        refuse_after_break(model, self._shards)

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_"):
            raise fixed(type(self).__name__, name)
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        """Settings, and where this rank is."""
        nodes, node = self._comm, self._inside
        return said(
            "HsdpState", self._given, f"node {nodes.rank} of {nodes.size}, rank {node.rank} of {node.size} in it"
        )

    @property
    def comm(self) -> Communicator:
        """The ranks that hold the same part."""
        return self._comm

    @property
    def skipped(self) -> int:
        """Number of steps that nonfinite="skip" left out."""
        return self._skipped

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
        """
        counted = {"steps": self._steps.taken, "skipped": self._skipped}
        return Stats({**counted, **self._exchange.stats(), "density": self._steps.density_of(self._scheme.entry)})

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals and momenta by parameter, and the algorithm's state. Another one on every rank.

        Tensors are padded as FSDP pads its parts. Loadable by torch.load(weights_only=True).

        Raises:
            RuntimeError: It is called in backward.
        """
        self._refuse_in_backward("state_dict()")
        self._exchange.commit_or_rollback()
        kept = self._exchange.state_dict()
        padded = [(name, torch.empty(shape, device=device)) for name, (shape, device) in self._shapes().items()]
        return {
            KEY: {
                **saved_by(self._comm),
                "algorithm": self._scheme.name,
                "steps": self._steps.taken,
                "skipped": self._skipped,
                "inside": [self._inside.rank, self._inside.size],
                **kept,
                **complete(kept, self._scheme.keeps, padded),
            }
        }

    def gathered_state_dict(self) -> dict[str, Any]:
        """The states of all ranks in one, for a checkpoint that one rank alone writes; for every rank to call.

        On the first rank of the first node, which holds it in the CPU's memory; {} elsewhere. Every rank loads it by
        `load_state_dict`, which takes its own part. Loadable by torch.load(weights_only=True).
        Where `state_dict` raises on one rank, the others raise a CollectiveError.

        Returns:
            By place inside a node the states of that place on all nodes.
        """
        whole = gathered_state(
            lambda: gathered_state(self.state_dict, self._comm, alike=False),
            self._inside,
            alike=False,
            advice=OTHER_NODES,
        )
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
        of_place = of_rank(state_dict, self._inside.rank, self._inside.size, advice=OTHER_NODES)
        own = check_saved_by(own_state(of_place, self._comm), self._comm.rank, self._comm.size)
        here = [self._inside.rank, self._inside.size]
        if own.get("inside") != here:
            raise ValueError(f"the state is of (rank, ranks) {own.get('inside')} inside a node, but this is {here}")
        if self._scheme.keeps:
            check_fit(own, {name: shape for name, (shape, _) in self._shapes().items()})
        self._exchange.load_state_dict(own)
        self._steps.taken, self._skipped = own["steps"], own["skipped"]

    def _reduced(self, shard: Shard, flat: Tensor) -> None:
        """FSDP's hook: one flat gradient, to be the mean between the nodes once backward has ended."""
        if not self._backward.goes_on:
            self._begin()
        bucket = shard.bucket(flat)
        unused = unused_spans(spans_of(bucket), flat) if self._exchange.keeps else ()
        waits = shard.may_wait(flat)
        if self._clip_norm is not None:
            self._exchange.clip([flat], of=self._inside.size * sum(one.numel for one in self._shards))
        try:
            self._pending.append((self._exchange.start(bucket, flat, unused=unused), flat))
            if not waits:
                self._finish(*self._pending.pop())
        except CollectiveError as error:
            self._error = self._error or error

    def _begin(self) -> None:
        """Begins a backward at its first gradient; also a new step, unless gradients exist already."""
        self._leave_broken()
        self._error = None
        self._backward.begin()
        if any(p.grad is not None and bool(part_of(p.grad).any()) for p in self._named.values()):
            return
        self._exchange.commit_or_rollback()
        self._steps.begin()
        try:
            self._steps.count(self._parts(), self._comm)
        except CollectiveError as error:
            self._error = error  # told to all ranks of the node, when they can be asked

    def _end(self) -> None:
        """Waits, after backward has ended on every rank, for exchanges under way; all ranks learn the outcome."""
        self._exchange.begin_waiting()
        pending, self._pending = self._pending, []
        for work, flat in pending:
            try:
                self._finish(work, flat)
            except CollectiveError as error:
                self._error = self._error or error
        outcome = agreed(Outcome(self._error, self._exchange.finite()), self._inside)
        if outcome.error is None and outcome.finite:
            self._note()
            return
        self._take_back()
        if outcome.error is not None:
            raise outcome.error
        self._skipped += 1

    def _take_back(self) -> None:
        self._exchange.undo()
        for p in self._named.values():
            p.grad = None

    def _leave_broken(self) -> None:
        """Waits for what a backward had begun that an exception broke off, and takes that back."""
        if not self._backward.broke_off:
            return
        self._backward.over()
        pending, self._pending = self._pending, []
        for work, _ in pending:
            with suppress(CollectiveError):  # of ranks that did not get so far: the next exchange says so again
                work.wait()
        self._take_back()

    def _refuse_in_backward(self, what: str) -> None:
        self._leave_broken()
        if self._backward.goes_on:
            raise RuntimeError(f"{what} in backward: call it after step()")

    def _note(self) -> None:
        """Shows the optimizer's gradients to the watcher of its steps."""
        if self._seen is not None:
            held = [p for p in self._named.values() if p.grad is not None]
            self._seen.note(held, [part_of(p.grad) for p in held])

    @staticmethod
    def _finish(work: Work[Tensor], flat: Tensor) -> None:
        mean = work.wait()
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
