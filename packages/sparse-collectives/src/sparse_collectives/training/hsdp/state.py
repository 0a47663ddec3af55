"""Hybrid sharding with a sparse exchange: `state = sparse_hsdp(model, mesh["between"], density=0.01)`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from communicators import CollectiveError, Communicator, Work
from communicators.replicas.first_broadcast import broadcast_parameters
from communicators.replicas.parameters import check_pairs
from communicators.replicas.saved_by import KEY
from sparse_compress import Compressor
from torch import Tensor, nn
from torch.autograd import Variable

from sparse_collectives.algorithm import Algorithm
from sparse_collectives.algorithms.table import AUTO
from sparse_collectives.training.ddp.buckets import spans_of, unused_spans
from sparse_collectives.training.hsdp.clean import CleanExchange
from sparse_collectives.training.hsdp.mesh import joined
from sparse_collectives.training.hsdp.outcome import Outcome, agreed
from sparse_collectives.training.hsdp.seen_optimizer import SeenOptimizer
from sparse_collectives.training.hsdp.shards import Shard, shards_of
from sparse_collectives.training.scheme import choose_scheme
from sparse_collectives.training.schemes.table import WholeScheme
from sparse_collectives.training.settings import check_compressor, check_dense_below, check_momentum, check_settings
from sparse_collectives.training.state_dict import check_fit, check_saved_by, complete, saved_by
from sparse_collectives.training.steps import Schedule, Steps

OWNER = "sparse_hsdp"


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
    dense_below: int = 0,
    nonfinite: str = "raise",
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
        dense_below: Tensors whose parts have fewer elements are summed whole. 0: none.
        nonfinite: "raise": a NaN or inf in any rank's gradient is a CollectiveError out of backward(), on every rank,
            that names rank and parameter. "skip": every rank then has no gradients (p.grad is None), so that
            optimizer.step() does nothing, counts it in `skipped`, and keeps residuals as they were before the step, for
            twice their memory.

    Raises:
        TypeError, ValueError: A setting, a model that is not sharded so or was given before, or ranks that make no grid
            of nodes and places inside them; on every rank, before anything is written.
    """
    return HsdpState(
        model,
        between,
        compressor=check_compressor(compressor, density),
        momentum=check_momentum(momentum),
        density=density,
        algorithm=algorithm,
        options=options,
        wire=wire,
        dense_below=check_dense_below(dense_below, algorithm),
        nonfinite=nonfinite,
    )


class HsdpState:
    """What `sparse_hsdp` keeps between steps: residuals and momenta of this rank's part of each parameter.

    `sparse_hsdp` makes it.

    Args:
        model: As there, as are the others.
        between: As there.
        compressor: What it has chosen.
        density: As there.
        algorithm: As there.
        options: As there.
        wire: As there.
        momentum: As there.
        dense_below: As there.
        nonfinite: As there.

    Attributes:
        skipped: Steps that were, with nonfinite="skip".
    """

    def __init__(
        self,
        model: nn.Module,
        between: Any,
        *,
        compressor: Compressor,
        density: float | Schedule | None,
        algorithm: str | Algorithm | WholeScheme,
        options: Mapping[str, Any] | None,
        wire: str,
        momentum: float,
        dense_below: int,
        nonfinite: str,
    ) -> None:
        if nonfinite not in ("raise", "skip"):
            raise ValueError(f"nonfinite is {nonfinite!r}, expected 'raise' or 'skip'")
        if isinstance(algorithm, str) and algorithm == AUTO:
            raise ValueError(f"algorithm={AUTO!r} measures replicas of a whole model: name one, such as 'gtopk'")
        check_settings(algorithm, options, wire, compressor, momentum, "the optimizer")
        self._shards, self._named = shards_of(model)
        check_pairs(list(self._named.items()))
        self._comm, self._inside = joined(self._shards, between)
        self._steps, self._nonfinite, self.skipped = Steps(compressor, density, None), nonfinite, 0
        chosen = choose_scheme(
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
        self._chosen, self._names = chosen, list(self._named)
        self._exchange = CleanExchange(chosen.scheme, self._comm, self._names, owner=OWNER, nonfinite=nonfinite)
        self._pending: list[tuple[Work[Tensor], Tensor]] = []
        self._error: CollectiveError | None = None
        self._in_backward = False
        settings = f"{chosen.algorithm}, {wire=}, {momentum=}, {nonfinite=}, {', '.join(chosen.settings)}"
        parts = {name: _part(p) for name, p in self._named.items()}
        broadcast_parameters(parts, self._comm, what=OWNER, settings=settings)
        self._seen: SeenOptimizer | None = None  # kept here, because nobody else does
        if chosen.entry is not None and chosen.entry.compresses:
            density_then = self._steps.last_density
            self._seen = SeenOptimizer(self._named.values(), momentum=momentum, density=density_then)
        for shard in self._shards:
            shard.when_reduced(partial(self._reduced, shard))

    @property
    def comm(self) -> Communicator:
        """The ranks that hold the same part."""
        return self._comm

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals and momenta by parameter, and the algorithm's state. Another one on every rank.

        Tensors are padded as FSDP pads its parts. Loadable by torch.load(weights_only=True).

        Raises:
            RuntimeError: It is called in backward.
        """
        if self._in_backward:
            raise RuntimeError("state_dict() in backward: call it after step()")
        self._exchange.settle()
        kept = self._exchange.state_dict()
        padded = [(name, torch.empty(shape, device=device)) for name, (shape, device) in self._shapes().items()]
        return {
            KEY: {
                **saved_by(self._comm),
                "algorithm": self._chosen.algorithm,
                "steps": self._steps.taken,
                "skipped": self.skipped,
                "inside": [self._inside.rank, self._inside.size],
                **kept,
                **complete(kept, self._chosen.scheme.memories, padded),
            }
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on where this rank's `state_dict` was taken, with the same bits.

        Args:
            state_dict: What `state_dict` gave on this rank.

        Raises:
            ValueError: Before anything is changed: it is of another rank, of another number of ranks, or of other
                parameters.
        """
        own = check_saved_by(state_dict, self._comm.rank, self._comm.size)
        here = [self._inside.rank, self._inside.size]
        if own.get("inside") != here:
            raise ValueError(f"the state is of (rank, ranks) {own.get('inside')} inside a node, but this is {here}")
        if self._chosen.scheme.memories:
            check_fit(own, {name: shape for name, (shape, _) in self._shapes().items()})
        states = own["algorithm_state"] if own["algorithm"] == self._chosen.algorithm else []
        self._exchange.load_state_dict({**own, "algorithm_state": states})
        self._steps.taken, self.skipped = own["steps"], own["skipped"]

    def _reduced(self, shard: Shard, flat: Tensor) -> None:
        """FSDP's hook: one flat gradient, to be the mean between the nodes once backward has ended."""
        if not self._in_backward:
            self._begin()
        bucket = shard.bucket(flat)
        unused = unused_spans(spans_of(bucket), flat) if self._exchange.scheme.memories else ()
        waits = shard.may_wait(flat)
        try:
            self._pending.append((self._exchange.start(bucket, flat, unused=unused), flat))
            if not waits:
                self._finish(*self._pending.pop())
        except CollectiveError as error:
            self._error = self._error or error

    def _begin(self) -> None:
        """The first gradient of a backward; of a new step unless there are some already."""
        self._in_backward, self._error = True, None
        Variable._execution_engine.queue_callback(self._end)
        if not any(p.grad is not None and bool(_part(p.grad).any()) for p in self._named.values()):
            self._exchange.settle()
            self._steps.begin()
            self._steps.taken += 1

    def _end(self) -> None:
        """Backward has ended, on every rank: what is under way is waited for, and all ranks learn how it went."""
        self._exchange.tally.begin_waiting()
        pending, self._pending, self._in_backward = self._pending, [], False
        for work, flat in pending:
            try:
                self._finish(work, flat)
            except CollectiveError as error:
                self._error = self._error or error
        outcome = agreed(Outcome(self._error, self._exchange.finite()), self._inside)
        if outcome.error is None and outcome.finite:
            return
        self._exchange.undo()
        for p in self._named.values():
            p.grad = None
        if outcome.error is not None:
            raise outcome.error
        self.skipped += 1

    @staticmethod
    def _finish(work: Work[Tensor], flat: Tensor) -> None:
        mean = work.wait()
        if mean is not flat:
            flat.copy_(mean)

    def _shapes(self) -> dict[str, tuple[torch.Size, torch.device]]:
        """Of the padded parts that learn, by name."""
        names = {id(p): name for name, p in self._named.items()}
        return {
            names[id(p.sharded_param)]: (p.padded_sharded_param_size, p.sharded_param.device)
            for shard in self._shards
            for p in shard.trained
        }


def _part(tensor: Any) -> Tensor:
    """This rank's, of a DTensor."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach()
